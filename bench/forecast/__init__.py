"""Do forecasts come true? The simulator and the planner against measurements and published runs."""
