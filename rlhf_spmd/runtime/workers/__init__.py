"""Worker processes of a rank for code of the user: how they are started, spoken to and ended."""
