"""Mistral 7B (arXiv 2310.06825): all its layers have a sliding window, or none has."""

from rlhf_spmd.model.families.family import Family

FAMILY = Family(
    prefix="Mistral",
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    windows=("sliding_window",),
)
