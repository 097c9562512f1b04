"""The generate subcommand on the ranks: responses to a file of prompts."""
