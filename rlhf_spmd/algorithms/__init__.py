"""Algorithms: one page each (page.py defines the interface), and the pure functions that their calls name."""
