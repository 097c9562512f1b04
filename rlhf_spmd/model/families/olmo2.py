"""OLMo 2 (arXiv 2501.00656): norms of what a block adds, and of all heads' queries and keys together."""

from rlhf_spmd.model.families.family import BIASES, Family

FAMILY = Family(
    prefix="Olmo2",
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    always=("qk_norm", "qk_norm_of_all"),
    switches={"attention_bias": BIASES},
    norms="after",
)
