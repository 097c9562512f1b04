"""The inputs of a run other than weights: prompts and reward functions."""
