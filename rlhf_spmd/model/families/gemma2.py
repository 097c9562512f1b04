"""Gemma 2 (arXiv 2408.00118): four norms a layer, soft caps, and a window in each second layer."""

from rlhf_spmd.model.families.family import BIASES, GELU, Family

FAMILY = Family(
    prefix="Gemma2",
    defaults={
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
    },
    always=("norm_offset", "scales_embeddings"),
    switches={"attention_bias": BIASES},
    activation=("hidden_activation", *GELU[:1]),
    refused=("use_bidirectional_attention",),
    numbers={"query_pre_attn_scalar": "attention_size"},
    caps={"attn_logit_softcapping": "attention_cap", "final_logit_softcapping": "logits_cap"},
    norms="both",
    windows=("sliding_window", "layer_types"),
    full_step=2,
    even_heads=True,
)
