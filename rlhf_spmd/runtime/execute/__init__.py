"""Executes a program: the instruction list, the calls, an optimizer step, pipeline stages."""
