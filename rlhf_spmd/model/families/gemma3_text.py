"""Gemma 3 without pictures (arXiv 2503.19786): four norms a layer; most layers have a window and their own rope."""

from rlhf_spmd.model.families.family import BIASES, GELU, Family

FAMILY = Family(
    prefix="Gemma3",
    classifier="Gemma3Text",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 4096,
        "final_logit_softcapping": None,
        **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
    },
    always=("qk_norm", "norm_offset", "scales_embeddings"),
    switches={"attention_bias": BIASES},
    activation=("hidden_activation", *GELU[:1]),
    refused=("use_bidirectional_attention", "attn_logit_softcapping"),
    numbers={"query_pre_attn_scalar": "attention_size"},
    caps={"final_logit_softcapping": "logits_cap"},
    norms="both",
    windows=("sliding_window", "layer_types"),
    full_step=6,
    even_heads=True,
)
