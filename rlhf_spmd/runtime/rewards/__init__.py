"""Scores of responses: reward models, reward functions and their processes."""
