"""One file per subcommand of the program."""
