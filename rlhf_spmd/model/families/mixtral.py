"""Mixtral (arXiv 2401.04088): Mistral with experts in all layers, whose weights always sum to 1."""

from rlhf_spmd.model.families.family import KEPT, UNSUPPORTED, Family

FAMILY = Family(
    prefix="Mixtral",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    always=("norm_topk",),
    windows=("sliding_window",),
    sizes={
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "intermediate_size": "expert_size",
    },
    kept=KEPT,
    refused=UNSUPPORTED,
    tensors={
        "mlp.gate": ("block_sparse_moe.gate",),
        "mlp.experts.gate_up_proj": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        "mlp.experts.down_proj": ("block_sparse_moe.experts.{}.w2",),
    },
)
