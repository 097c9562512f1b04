"""Do numbers stay what they should be: invariance, bfloat16, convergence, learning."""
