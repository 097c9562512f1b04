"""What a run reads besides weights: prompts, reward functions."""
