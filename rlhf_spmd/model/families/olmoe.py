"""OLMoE (arXiv 2409.02060): norms of all heads together, and experts in all layers."""

from rlhf_spmd.model.families.family import BIASES, EXPERTS, KEPT, UNSUPPORTED, Family

FAMILY = Family(
    prefix="Olmoe",
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    always=("qk_norm", "qk_norm_of_all"),
    switches={"attention_bias": BIASES, "norm_topk_prob": ("norm_topk",)},
    even_heads=True,
    sizes={
        "num_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "intermediate_size": "expert_size",
    },
    kept=KEPT,
    refused=UNSUPPORTED,
    tensors=EXPERTS,
)
