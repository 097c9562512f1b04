"""Generation: the engine, its requests, blocks, KV cache and CUDA graphs."""
