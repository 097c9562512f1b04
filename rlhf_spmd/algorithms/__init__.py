"""Algorithms: a page for each (page.py says what one is made of), and the pure functions that their calls name."""
