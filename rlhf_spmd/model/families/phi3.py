"""Phi-3 and 4 (arXiv 2404.14219, 2412.08905): matrices in one, longrope; rope may turn a part of heads."""

from rlhf_spmd.model.families.family import Family

FAMILY = Family(
    prefix="Phi3",
    defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    windows=("sliding_window",),
    partial_rotary="partial_rotary_factor",
    kept=("original_max_position_embeddings",),
    joint={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
)
