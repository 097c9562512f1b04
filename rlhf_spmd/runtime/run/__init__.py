"""A training run: the loop over iterations, its folder, console, logs and timeline."""
