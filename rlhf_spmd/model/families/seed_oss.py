"""Seed-OSS (of ByteDance, 2025): Llama with biases on q, k and v."""

from rlhf_spmd.model.families.family import Family

FAMILY = Family(
    prefix="SeedOss",
    defaults={"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    switches={
        "attention_bias": ("attention_bias",),
        "attention_out_bias": ("attention_output_bias",),
        "mlp_bias": ("mlp_bias",),
    },
)
