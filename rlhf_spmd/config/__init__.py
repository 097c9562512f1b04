"""The options of a run, where they come from, and what they mean together."""
