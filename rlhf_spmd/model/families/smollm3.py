"""SmolLM3 (huggingface.co/blog/smollm3): each fourth layer has no rope (arXiv 2501.18795)."""

from rlhf_spmd.model.families.family import BIASES, Family

FAMILY = Family(
    prefix="SmolLM3",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
    switches={"attention_bias": BIASES, "mlp_bias": ("mlp_bias",)},
    windows=("use_sliding_window", "sliding_window", "layer_types"),
    without_rope=("no_rope_layers", "no_rope_layer_interval"),
)
