"""The comparison with vLLM: tokens per second of generation on a CPU."""
