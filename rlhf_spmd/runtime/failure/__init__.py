"""Detects and explains failures of a job: supervisor, watch, diagnosis, postmortem, signals."""
