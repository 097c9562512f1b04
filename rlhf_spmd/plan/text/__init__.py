"""Programs and placements as text."""
