"""Algorithms: one file each (page.py defines the interface), and the pure functions that their calls name."""
