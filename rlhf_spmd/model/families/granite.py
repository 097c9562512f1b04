"""Granite 3 (of IBM, 2024): Llama with four multipliers, by which models of all widths train with one learning rate."""

from rlhf_spmd.model.families.family import BIASES, Family

FAMILY = Family(
    prefix="Granite",
    defaults={
        "max_position_embeddings": 2048,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    switches={"attention_bias": BIASES, "mlp_bias": ("mlp_bias",)},
    numbers={
        "embedding_multiplier": "embedding_scale",
        "attention_multiplier": "attention_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logits_scale",
    },
)
