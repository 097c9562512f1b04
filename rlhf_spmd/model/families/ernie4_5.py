"""ERNIE 4.5 (of Baidu, 2025), the dense models: rope turns neighbours."""

from rlhf_spmd.model.families.family import BIASES, Family

FAMILY = Family(
    prefix="Ernie4_5",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
    },
    always=("rope_alternates",),
    switches={"use_bias": (*BIASES, "mlp_bias")},
)
