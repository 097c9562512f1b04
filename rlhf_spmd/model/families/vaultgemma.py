"""VaultGemma (arXiv 2510.15001): Gemma 2, trained with differential privacy, with two norms a layer."""

from dataclasses import replace

from rlhf_spmd.model.families import gemma2

FAMILY = replace(
    gemma2.FAMILY,
    prefix="VaultGemma",
    norms="before",
    layer_names={"post_attention_layernorm": "pre_feedforward_layernorm"},
)
