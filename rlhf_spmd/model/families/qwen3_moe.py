"""Qwen 3's mixtures (arXiv 2505.09388), such as Qwen3-30B-A3B; the first layers may be dense."""

from rlhf_spmd.model.families.family import BIASES, EXPERTS, KEPT, UNSUPPORTED, Family

FAMILY = Family(
    prefix="Qwen3Moe",
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4, "sliding_window": 4096},
    always=("qk_norm",),
    switches={"attention_bias": BIASES, "norm_topk_prob": ("norm_topk",)},
    windows=("use_sliding_window", "sliding_window"),
    sizes={
        "num_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "moe_intermediate_size": "expert_size",
    },
    first_dense=("mlp_only_layers", "decoder_sparse_step"),
    kept=KEPT,
    refused=UNSUPPORTED,
    tensors=EXPERTS,
)
