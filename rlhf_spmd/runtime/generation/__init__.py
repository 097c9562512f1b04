"""Generation: the engine, its requests, scheduler, KV cache and CUDA graphs."""
