"""From a placement to the instruction lists of all ranks."""
