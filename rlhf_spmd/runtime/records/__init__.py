"""What a run writes, and what reads it: its folder, console, loggers, rollouts and page."""
