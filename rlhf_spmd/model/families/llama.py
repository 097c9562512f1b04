"""Llama 1 to 3 (arXiv 2302.13971, 2307.09288, 2407.21783), and what is built alike: SmolLM2, TinyLlama."""

from rlhf_spmd.model.families.family import BIASES, Family

FAMILY = Family(
    prefix="Llama",
    defaults={"max_position_embeddings": 2048},
    switches={"attention_bias": BIASES, "mlp_bias": ("mlp_bias",)},
    even_heads=True,
)
