"""The rehearsal of a job: its processes, messages and instruction lists, with sleeps in place of computation."""
