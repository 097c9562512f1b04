"""What ranks record about themselves: spans, numbers for the log, positions, flight records."""
