"""One file per verb of the program."""
