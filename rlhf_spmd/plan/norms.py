"""The norms of a layer beside its blocks, attention and MLP. Names are Hugging Face's."""

# where a block is normed: its input, its output, or both, by Gemma's or GLM's names -> the norms before and after
# attention, and those of the MLP
NORMS: dict[str, tuple[str | None, str | None, str | None, str | None]] = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    "around": ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
}


def num_norms(norms: str) -> int:
    """Returns how many norms of the hidden size a layer has."""
    return sum(name is not None for name in NORMS[norms])
