"""Figures, the timeline and the page of a run, for its folder and the subcommands that draw."""
