"""Gemma 1 (arXiv 2403.08295): gated GELU, norms whose weights are added to 1, scaled embeddings that are the head."""

from rlhf_spmd.model.families.family import BIASES, GELU, Family

FAMILY = Family(
    prefix="Gemma",
    defaults={
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "tie_word_embeddings": True,
        **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
    },
    always=("norm_offset", "scales_embeddings"),
    switches={"attention_bias": BIASES},
    activation=("hidden_act", *GELU),
    refused=("use_bidirectional_attention",),
)
