"""Checkpoints: their files and contents, writing them during a run, and resuming from them."""
