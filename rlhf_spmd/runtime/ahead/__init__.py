"""Runs that draw one iteration ahead: their steps, and the batch in flight in checkpoints."""
