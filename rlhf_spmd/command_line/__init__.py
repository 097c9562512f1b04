"""What several subcommands share: reading their arguments, checking, planning and writing."""
