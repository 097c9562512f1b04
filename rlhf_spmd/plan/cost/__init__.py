"""What a program costs: seconds and bytes by formulas, the simulator, forecasts."""
