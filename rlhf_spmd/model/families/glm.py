"""GLM-4 of 2024 (arXiv 2406.12793): biases on q, k and v, and rope turns neighbours in half of each head."""

from rlhf_spmd.model.families.family import Family

FAMILY = Family(
    prefix="Glm",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    always=("rope_alternates",),
    switches={"attention_bias": ("attention_bias",)},
    partial_rotary="partial_rotary_factor",
    joint={"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")},
)
