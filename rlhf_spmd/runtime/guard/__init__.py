"""What notices and explains that a job fails: supervisor, watch, diagnosis, postmortem, signals."""
