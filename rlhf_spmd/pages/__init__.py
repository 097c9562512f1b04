"""What users write, and how it is loaded: pages of algorithms, strategies, functions, and their options."""
