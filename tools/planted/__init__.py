"""Faults that are planted on purpose, and the tests that must find them."""
