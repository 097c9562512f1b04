"""The planner: finds placements by three methods."""
