"""Toy pages: algorithms of one file each, which no other file mentions."""
