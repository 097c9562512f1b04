"""Qwen 2 and 2.5 (arXiv 2407.10671, 2412.15115): biases on q, k and v; the upper layers may have a sliding window."""

from rlhf_spmd.model.families.family import BY_LAYER, Family

FAMILY = Family(
    prefix="Qwen2",
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    always=("attention_bias",),
    windows=BY_LAYER,
)
