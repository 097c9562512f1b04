"""RLHF as one SPMD program: which rank does what is a one-page strategy (see CONTRIBUTING.md for the architecture)."""

__version__ = "0.1.0"
