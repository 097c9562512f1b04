"""Measures a machine for forecasts."""
