"""Checkpoints: their files, what is in them, when they are written, what a resume may change."""
