"""Makes calibrations: constants fitted to published runs, and constants derived from data sheets."""
