"""Makers of pages of the documents from the code: options, rooms, option names of other programs, the usual walk."""
