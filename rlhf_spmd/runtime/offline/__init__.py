"""The generate verb on the ranks: responses to a file of prompts."""
