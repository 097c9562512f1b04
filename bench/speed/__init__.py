"""How fast it is: kernels, generation, iterations, and what guards cost."""
