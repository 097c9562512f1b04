"""The rules for files, JSON and printed text."""
