"""Qwen 3 (arXiv 2505.09388): norms of every head's queries and keys, and no biases by default."""

from rlhf_spmd.model.families.family import BIASES, BY_LAYER, Family

FAMILY = Family(
    prefix="Qwen3",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "head_dim": 128,
    },
    always=("qk_norm",),
    switches={"attention_bias": BIASES},
    windows=BY_LAYER,
)
