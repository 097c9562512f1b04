"""What the page of a family says: how its config.json is read and written, and how its tensors are named."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BIASES = ("attention_bias", "attention_output_bias")  # which one key turns on together
BY_LAYER = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")  # windows of some layers


@dataclass(frozen=True, slots=True)
class Family:
    """One family of models. Keys are those of config.json, fields those of `ModelConfig`; the layers know fields only.

    prefix: of transformers' classes: that of LlamaForCausalLM is Llama.
    defaults: what transformers takes for keys that are missing.
    always: fields that are true in every model.
    switches: keys that are true or false -> the fields that they set.
    windows: the keys that say which layers have a sliding window; without max_window_layers and layer_types all have.
    even_heads: whether transformers refuses a hidden size that is not a multiple of the number of heads.
    """

    prefix: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    always: tuple[str, ...] = ()
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    windows: tuple[str, ...] = ()
    even_heads: bool = False
