"""The planner: finds placements by two methods."""
