"""What the page of a family says: how its config.json is read and written, and how its tensors are named."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BIASES = ("attention_bias", "attention_output_bias")  # which one key turns on together
BY_LAYER = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")  # windows of some layers
KEPT = ("output_router_logits", "router_aux_loss_coef")  # of mixtures
EXPERTS = {  # all experts of a layer -> each of them
    "mlp.experts.gate_up_proj": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "mlp.experts.down_proj": ("mlp.experts.{}.down_proj",),
}
GELU = ("gelu_pytorch_tanh", "gelu")  # which transformers takes for the first one
ACTIVATIONS = (  # of MLPs without a gate, any of which a model may have
    *("gelu", "gelu_python", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu_accurate"),
    *("quick_gelu", "relu", "relu2", "silu", "swish"),
)
UNSUPPORTED = (  # of mixtures: shared experts, groups of experts, clipped queries and keys
    *("shared_expert_intermediate_size", "n_shared_experts", "n_group", "topk_group", "clip_qkv"),
)


@dataclass(frozen=True, slots=True)
class Family:
    """One family of models. Keys are those of config.json, fields those of `ModelConfig`; the layers know fields only.

    prefix: of transformers' classes: that of LlamaForCausalLM is Llama.
    causal: the end of the name of its class for language models.
    classifier: the prefix of its class for sequence classification, if that is another one.
    defaults: what transformers takes for keys that are missing.
    always: fields that are true in every model.
    switches: keys that are true or false -> the fields that they set.
    keys: Hugging Face's usual keys -> the keys of this family.
    activation: the key of the activation and its names; the first of them is written. MLPs without a gate may have
        others, of ACTIVATIONS.
    refused: keys that ask for what no layer has.
    needed: keys that may say this alone, or what another key says.
    numbers: keys of multipliers and scales -> the fields that they give; positive, the same type is written again.
    caps: keys of soft caps -> the fields that they give; null: none.
    norms: where a block is normed (plan/norms.py).
    full_step: without layer_types, from one layer with full attention to the next, if sliding_window_pattern does not
        say it.
    windows: the keys that say which layers have a sliding window; without max_window_layers and layer_types all have.
    without_rope: the key that has a 0 for each layer without rope, else a 1, and the key of the step from one such
        layer to the next, for a list that is missing.
    partial_rotary: the key of the share of a head's dims that rope turns; empty: it turns all.
    positions: rows of a table of learned positions before that of the first token; None: rope.
    kept: keys that are written as they were read.
    joint: matrices in a folder -> ours, one below the other, that are its rows; with joint_by_head this for each
        key-value head.
    names: modules outside of layers, by Hugging Face's usual names, -> their names in a folder; `model`: around them.
    layer_names: the same of modules inside a layer.
    transposed: whether matrices of layers are stored [inputs, outputs].
    computed: ends of names of tensors in a folder that are no weights.
    even_heads: whether transformers refuses a hidden size that is not a multiple of the number of heads.

    Of mixtures of experts, where no key of sizes, switches or first_dense may be missing:

    sizes: keys -> the fields that they give, beside those of all models.
    first_dense: the keys that list dense layers, which must be the first ones, and the step from one sparse layer to
        the next, which must be 1; empty: all layers are sparse.
    tensors: our matrices of a layer -> those in a folder whose rows, one below the other, they are; `{}`: of each
        expert.
    """

    prefix: str
    causal: str = "ForCausalLM"
    classifier: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    always: tuple[str, ...] = ()
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    activation: tuple[str, ...] = ("hidden_act", "silu")
    refused: tuple[str, ...] = ()
    needed: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    caps: Mapping[str, str] = field(default_factory=dict)
    norms: str = "before"
    full_step: int = 0
    windows: tuple[str, ...] = ()
    without_rope: tuple[str, ...] = ()
    partial_rotary: str = ""
    positions: int | None = None
    kept: tuple[str, ...] = ()
    joint: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    joint_by_head: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    layer_names: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = False
    computed: tuple[str, ...] = ()
    even_heads: bool = False
    sizes: Mapping[str, str] = field(default_factory=dict)
    first_dense: tuple[str, ...] = ()
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
