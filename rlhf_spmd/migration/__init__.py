"""Configurations of TRL, verl and OpenRLHF, read as options of this program (the subcommand `coming-from`)."""
