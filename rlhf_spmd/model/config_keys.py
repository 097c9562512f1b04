"""Reads the keys of a config.json that are more than a number: ropes, windows, experts. Plain Python without torch."""

import re
from typing import Any, TypeGuard

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.families import FAMILIES
from rlhf_spmd.model.families.family import Family

# rope type -> the numbers it needs in addition to rope_theta
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("original_max_position_embeddings",),
}
LOCAL_THETA = "rope_local_base_freq"  # of families whose layers with a window have a rope of their own
ROPE_LISTS = ("short_factor", "long_factor")  # of longrope: a number for each pair of dims

# further optional numbers
_ROPE_NUMBERS = (
    *("original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim"),
    *("beta_fast", "beta_slow", "factor"),
)

# keys of models that nothing here trains -> what they say, and what to use in the place of such a model
OTHER_KINDS = {
    "quantization(_config)?": ("its weights are quantised and cannot be trained", "use the original model"),
    "(vision|audio|speech|thinker)_config|img_processor|mm_vision_tower": (
        "it has a tower for images or sounds",
        "use a model of text alone, such as its own, which transformers may write: "
        "AutoModelForImageTextToText.from_pretrained(FOLDER).model.language_model.save_pretrained(TEXT)",
    ),
}
UNKNOWN_KINDS = OTHER_KINDS | {  # also of families that are unknown here
    "(mamba|ssm|lru|linear)_.+|state_size|rescale_every|decay_low_rank_dim|hybrid_override_pattern": (
        "layers of it keep a state (state space, linear attention)",
        "use a model whose layers all have attention",
    ),
    "layer_types (?!full_attention|sliding_attention).+": (
        "layers of it have no attention, or another one than full and sliding",
        "use a model without such layers",
    ),
    "(num|num_local|n_routed|moe_num)_experts": (
        "it is a mixture of experts",
        f"supported mixtures are {', '.join(name for name, family in FAMILIES.items() if family.sizes)}",
    ),
}


def other_kind(values: dict[str, Any], *, is_known: bool) -> str:
    """Returns of which kind a model is that nothing here trains, and what to use; empty: none of its keys says so.

    is_known: whether its family is.
    """
    types = values.get("layer_types")
    said = [key for key, value in values.items() if value]
    said += [f"layer_types {kind}" for kind in types] if isinstance(types, list) else []
    for pattern, (what, instead) in (OTHER_KINDS if is_known else UNKNOWN_KINDS).items():
        if found := next((key for key in said if re.fullmatch(pattern, key)), ""):
            return f"{what} ({found}); {instead}"
    return ""


def integer(values: dict[str, Any], name: str) -> int:
    value = values.get(name)
    if not is_number(value) or not isinstance(value, int):
        raise UserError(f"{name!r} is {value!r}, but must be a whole number")
    return value


def token_id(values: dict[str, Any], name: str) -> int | None:
    return None if values.get(name) is None else integer(values, name)


def number(values: dict[str, Any], name: str, *, zero: bool = False) -> float:
    """Checks that a number is positive; with `zero`, it may be zero."""
    value = values[name]
    if not is_number(value) or value < 0 or (value == 0 and not zero):
        raise UserError(f"{name!r} is {value!r}, but must be a positive number")
    return float(value)


def is_number(value: Any) -> TypeGuard[float]:
    """Excludes true and false, which Python counts as integers, infinity, NaN, and huge integers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63


def rope_in(values: dict[str, Any], family: Family) -> tuple[float, dict[str, Any] | None, float]:
    """Returns (rope_theta, scaling or None, the share of a head that is turned), from `rope_parameters` (transformers
    5) or `rope_theta` + `rope_scaling`."""
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    parameters = values.get(key) or {}
    if not isinstance(parameters, dict):
        raise UserError(f"{key!r} is {parameters!r}, but must be an object with a rope_type, or null")
    parameters = dict(parameters)
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UserError(f"{key!r} differs between kinds of layers, which is not supported")
    theta = parameters.pop("rope_theta", None) or values.get(family.keys.get("rope_theta", "rope_theta")) or 10000.0
    theta = number({"rope_theta": theta}, "rope_theta")
    key = family.partial_rotary or "partial_rotary_factor"
    partial = parameters.pop("partial_rotary_factor", None) or values.get(key) or 1.0
    if partial != 1.0 and not family.partial_rotary:
        raise UserError(f"partial_rotary_factor {partial} is not supported; supported is 1.0")
    partial = number({key: partial}, key)
    rope_type = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if rope_type == "default":
        return theta, None, partial
    if not isinstance(rope_type, str):
        raise UserError(f"'rope_type' is {rope_type!r}, but must be one of {', '.join(ROPE_TYPES)}")
    if family.partial_rotary and "short_factor" in parameters:  # older names of it
        rope_type = {"su": "longrope", "yarn": "longrope"}.get(rope_type, rope_type)
    if rope_type in ("llama3", "yarn", "longrope") and "original_max_position_embeddings" in values:
        parameters["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    for name in _ROPE_NUMBERS:
        if parameters.get(name) is not None:
            number(parameters, name, zero=True)
    return theta, {"rope_type": rope_type} | parameters, partial


def local_theta_in(values: dict[str, Any], family: Family) -> float:
    """Returns the theta of the rope of layers with a window; that of the others is left in `rope_parameters`."""
    of_kinds, local = values.get("rope_parameters"), dict[str, Any]()
    if isinstance(of_kinds, dict) and "rope_type" not in of_kinds:
        local = of_kinds.get("sliding_attention") or {}
        values["rope_parameters"] = of_kinds.get("full_attention")
    theta, scaling, _ = rope_in({"rope_theta": values[LOCAL_THETA], "rope_parameters": local}, family)
    if scaling is not None:
        raise UserError(f"the rope of layers with a window is {scaling}, which is not supported; supported is default")
    return theta


def layers_without_rope_in(values: dict[str, Any], family: Family, num_layers: int) -> tuple[int, ...]:
    """Returns the layers without rope: those of the list, or the last of each `every` layers."""
    if not family.without_rope:
        return ()
    key, every = family.without_rope
    flags = values.get(key)
    if flags is None:
        step = integer(values, every)
        if step < 1:
            raise UserError(f"{every} is {step}, but must be at least 1")
        return tuple(range(step - 1, num_layers, step))
    if not isinstance(flags, list) or len(flags) < num_layers or not all(flag in (0, 1) for flag in flags):
        raise UserError(f"{key!r} must have a 1 or, for a layer without rope, a 0 for each of {num_layers} layers")
    return tuple(layer for layer, flag in enumerate(flags[:num_layers]) if not flag)


def windows_in(
    values: dict[str, Any], family: Family, num_layers: int, without_rope: tuple[int, ...]
) -> tuple[int | None, tuple[int, ...]]:
    """Returns (window or None, the layers that have it: all, or those of layer_types, without rope, or from
    max_window_layers on)."""
    said = {key: values.get(key) for key in family.windows}
    types = said.get("layer_types")
    if not family.full_step and not (said.get("sliding_window") and said.get("use_sliding_window", True)):
        if isinstance(types, list) and "sliding_attention" in types:
            raise UserError("'layer_types' names sliding_attention, but no window is set and used; correct one of them")
        return None, ()
    window = integer(values, "sliding_window")
    if "layer_types" not in said:
        return window, tuple(range(num_layers))
    if types is None and family.without_rope:
        return window, without_rope
    if types is None and family.full_step:
        step = integer({"sliding_window_pattern": family.full_step} | values, "sliding_window_pattern")
        return window, tuple(layer for layer in range(num_layers) if (layer + 1) % max(step, 1))
    if types is None:
        first = integer({"max_window_layers": 28} | values, "max_window_layers")
        return window, tuple(range(min(first, num_layers), num_layers))
    kinds = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != num_layers or not all(kind in kinds for kind in types):
        raise UserError(f"'layer_types' must name full_attention or sliding_attention for each of {num_layers} layers")
    return window, tuple(layer for layer, kind in enumerate(types) if kind == "sliding_attention")


def experts_in(values: dict[str, Any], family: Family) -> dict[str, int]:
    """Returns fields of a mixture of experts. No key may be missing: transformers takes sizes of no released model."""
    if not family.sizes:
        return {}
    plain, local = values.get("num_experts"), values.get("num_local_experts")  # transformers writes one or the other
    if None not in (plain, local) and plain != local:
        raise UserError(f"num_experts {plain!r} and num_local_experts {local!r} differ; correct one of them")
    values |= dict.fromkeys(("num_experts", "num_local_experts"), local if plain is None else plain)
    needed = {*family.switches, *family.first_dense} - {"attention_bias"}
    for key in sorted(needed - values.keys()):
        raise UserError(f"{key!r} is missing, and mixtures of experts have no default of it; copy config.json again")
    experts = {field: integer(values, key) for key, field in family.sizes.items()}
    if not family.first_dense:
        return experts
    (first, dense), (every, step) = ((key, values[key]) for key in family.first_dense)
    dense = dense or []
    if not isinstance(dense, list) or dense != [*range(len(dense))]:
        raise UserError(f"{first} {dense} is not supported; supported are the first layers: [0, 1, ...]")
    if step != 1:
        raise UserError(f"{every} {step!r} is not supported; supported is 1")
    return experts | {"num_dense_layers": len(dense)}
