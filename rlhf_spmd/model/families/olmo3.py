"""OLMo 3 (of Ai2, 2025): OLMo 2 with a sliding window in three of four layers, whose rope is not scaled."""

from rlhf_spmd.model.families.family import BIASES, Family

FAMILY = Family(
    prefix="Olmo3",
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_local_base_freq": 5e5,
        "sliding_window": 4096,
    },
    always=("qk_norm", "qk_norm_of_all"),
    switches={"attention_bias": BIASES},
    norms="after",
    windows=("sliding_window", "layer_types"),
    full_step=4,
)
