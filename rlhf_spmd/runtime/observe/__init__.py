"""What ranks say of themselves: spans, numbers for the log, positions, flight records."""
