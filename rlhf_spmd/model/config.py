"""The shape of a model, and its translation from and to Hugging Face's config.json. Plain Python without torch.

The supported families (families/) differ only in a few switches of `ModelConfig`. Their pages say what a family implies
and how its config.json says the rest.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.json_text import json_value
from rlhf_spmd.files.reading import NO_RIGHT, is_folder, read_bytes, refuse_pipes
from rlhf_spmd.model.config_keys import (
    LOCAL_THETA,
    ROPE_LISTS,
    ROPE_TYPES,
    experts_in,
    integer,
    is_number,
    layers_without_rope_in,
    local_theta_in,
    number,
    other_kind,
    rope_in,
    token_id,
    windows_in,
)
from rlhf_spmd.model.families import FAMILIES
from rlhf_spmd.model.families.family import ACTIVATIONS, Family

ROPE, LOCAL_ROPE = "rope", "local"  # that of most models' layers, and that of layers with a window

RANDOM = "random_weights.json"  # in the folder of a model whose weights are random, in place of them

MOST_EXPERTS = 256  # whose numbers fit into the bytes of routes

# Hugging Face's keys -> fields of ModelConfig
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
}
_OTHERS = ("rms_norm_eps", "max_position_embeddings")


def read_json(path: Path, *, any_size: bool = False) -> dict[str, Any]:
    """Reads the object in a JSON file. Raises UserError if the file is missing or does not hold a JSON object.

    any_size: of whole numbers, see json_value.
    """
    try:
        values = json_value(read_bytes(path), any_size=any_size)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} does not exist; {how_to_get(path.parent)}") from None
    except PermissionError:
        raise UserError(f"{path} {NO_RIGHT}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read as JSON ({reason}); copy it again") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} does not hold a JSON object; copy it again")
    return values


def how_to_get(folder: Path) -> str:
    """Advises how to get a missing model folder: a model of the Hugging Face hub must be downloaded first."""
    if len(folder.parts) == 2 and not is_folder(folder) and folder.parts[0] not in ("..", folder.root):
        return (
            f"if {folder} is a model of the Hugging Face hub, download it first on a machine with a network "
            f"connection: `hf download {folder} --local-dir FOLDER` (package huggingface_hub), then give that folder"
        )
    return (
        "give a model folder in Hugging Face's format (check, plan, forecast and rehearse read its config.json alone)"
    )


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Names the file, or other input, in the UserErrors raised in this context."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}") from error.__cause__


def refuse_adapter(folder: Path) -> None:
    """Raises UserError for a folder with an adapter (LoRA and others), which is not a whole model."""
    about, weights = folder / "adapter_config.json", [folder / f"adapter_model.{end}" for end in ("safetensors", "bin")]
    has_weights = any(map(Path.is_file, weights))
    whole = [name for name in ("model.safetensors", "model.safetensors.index.json") if (folder / name).is_file()]
    if not (has_weights or (about.is_file() and not whole)):
        return
    values = {}
    with suppress(UserError):
        values = read_json(about)
    kind, base = values.get("peft_type") or "PEFT", values.get("base_model_name_or_path") or "its base model"
    merged = f"; if {whole[0]} has it merged already, remove the adapter's files" if whole else ""
    raise UserError(
        f"{folder} holds an adapter ({kind}) for {base}, not a whole model; merge it: python -m rlhf_spmd convert "
        f"{folder} MERGED --merge --base BASE, and give MERGED{merged}"
    )


def read_config_json(path: Path) -> "ModelConfig":
    """Reads the model that a config.json describes. Raises UserError naming the file and the key that is wrong, and for
    a folder with an adapter."""
    refuse_adapter(path.parent)
    refuse_pipes(path.parent)
    values = read_json(path, any_size=True)  # from_hf names the key of a wrong one
    with naming(path):
        return from_hf(values)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one transformer. Raises UserError for shapes that its family does not support."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)  # Hugging Face's keys; None: plain rope
    max_position_embeddings: int = 2048
    num_positions: int = 0  # rows of a table of learned positions, in the place of rope; the last ones are used
    tie_embeddings: bool = False
    attention_bias: bool = False  # on q, k and v
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_of_all: bool = False  # of all heads together (OLMoE), not of each
    num_experts: int = 0  # of a mixture; its MLPs, but those of the first num_dense_layers, have experts
    experts_per_token: int = 0
    expert_size: int = 0  # intermediate size of an expert
    num_dense_layers: int = 0
    norm_topk: bool = False  # whether the weights of a token's experts sum to 1
    kept: dict[str, Any] = field(default_factory=dict, hash=False)  # keys of config.json that are written again
    sliding_window: int | None = None  # a token sees itself and the sliding_window - 1 tokens before it
    sliding_layers: tuple[int, ...] = ()  # the layers that have that window
    layers_without_rope: tuple[int, ...] = ()
    local_rope_theta: float | None = None  # of the rope of layers with a window, if they have another one
    norms: str = "before"  # where a block is normed: its input ("before"), what it adds ("after"), "both", "around"
    activation: str = "silu"
    norm_offset: bool = False  # norms multiply by 1 + weight
    layer_norm: bool = False  # norms are LayerNorm with a bias
    parallel_residual: bool = False  # the MLP reads what attention reads, and both are added at once
    plain_mlp: bool = False  # without a gate
    scales_embeddings: bool = False  # by the root of the hidden size, rounded as weights are
    rotary_factor: float = 1.0  # the share of a head's dims that rope turns, the first ones
    rope_alternates: bool = False  # a pair of dims that rope turns is two neighbours; else of each half one
    embedding_scale: float = 1.0
    attention_scale: float = 0.0  # of the products of queries and keys; 0: 1 / sqrt(attention_size)
    attention_size: float = 0.0  # 0: head_dim
    residual_scale: float = 1.0  # of what attention and MLP add
    logits_scale: float = 1.0  # that logits are divided by
    attention_cap: float | None = None  # of scores; see kernels/soft_cap.py
    logits_cap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self):
        if self.model_type not in FAMILIES:
            raise UserError(f"model_type {self.model_type!r} is not supported; supported are {', '.join(FAMILIES)}")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly; "
                "the number of attention heads must be a multiple of the number of key-value heads"
            )
        if self.head_dim < 2 or self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            turned = "" if self.rotary_factor == 1 else f", of which {self.rotary_factor} are turned"
            raise UserError(f"head_dim is {self.head_dim}{turned}, but rotary positions need an even number")
        if FAMILIES[self.model_type].even_heads and self.hidden_size % self.num_heads:
            raise UserError(
                f"hidden_size {self.hidden_size} is not a multiple of the {self.num_heads} attention heads, which "
                f"transformers refuses for {self.model_type}"
            )
        self._check_experts()
        if self.rope_type not in ROPE_TYPES:
            raise UserError(f"rope type {self.rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
        for name in ROPE_TYPES[self.rope_type]:
            value = (self.rope_scaling or {}).get(name)
            if not is_number(value) or value <= 0:
                raise UserError(f"rope type {self.rope_type!r} needs a positive number {name!r}, not {value!r}")
        for name in ROPE_LISTS if self.rope_type == "longrope" else ():
            factors, pairs = (self.rope_scaling or {}).get(name), self.rotary_dim // 2
            are_numbers = isinstance(factors, list) and all(is_number(factor) and factor > 0 for factor in factors)
            if not are_numbers or len(factors) != pairs:
                raise UserError(f"rope type 'longrope' needs {pairs} positive numbers {name!r}")

    def _check_experts(self) -> None:
        if not self.num_experts and not FAMILIES[self.model_type].sizes:
            return
        for name, least, most in (
            ("num_experts", 1, MOST_EXPERTS),
            ("experts_per_token", 1, self.num_experts),
            ("num_dense_layers", 0, self.num_layers - 1),
        ):
            if not least <= getattr(self, name) <= most:
                raise UserError(f"{name} is {getattr(self, name)}, but must be at least {least} and at most {most}")
        if self.expert_size < 1:
            raise UserError(f"expert_size is {self.expert_size}, but must be at least 1")

    @property
    def rope_type(self) -> str:
        scaling = self.rope_scaling or {}
        return scaling.get("rope_type") or scaling.get("type") or "default"

    @property
    def rotary_dim(self) -> int:
        """How many dims of a head rope turns."""
        return int(self.head_dim * self.rotary_factor)

    def window(self, layer: int) -> int | None:
        """Returns how many tokens a query in this layer sees, including its own; None: all of them."""
        return self.sliding_window if layer in self.sliding_layers else None

    @property
    def query_scale(self) -> float:
        """What queries are multiplied by before attention, whose scale is 1 / sqrt(head_dim)."""
        if self.attention_scale:
            return self.attention_scale * math.sqrt(self.head_dim)
        return math.sqrt(self.head_dim / (self.attention_size or self.head_dim))

    def rope_of(self, layer: int) -> str | None:
        """Returns which rope turns the queries and keys of this layer; None: they are not turned."""
        if layer in self.layers_without_rope or self.num_positions:
            return None
        return LOCAL_ROPE if self.local_rope_theta and layer in self.sliding_layers else ROPE


def from_hf(values: dict[str, Any]) -> ModelConfig:
    """Reads the contents of a config.json of transformers 4 or 5.

    Raises UserError naming the key for unsupported families and features, and for values of the wrong type.
    """
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        kind = other_kind(values, is_known=False) or f"supported are {', '.join(FAMILIES)}"
        raise UserError(f"model_type {name!r} is not supported; {kind}")
    if kind := other_kind(values, is_known=True):
        raise UserError(kind)
    family = FAMILIES[name]
    key, *names = family.activation
    others = ACTIVATIONS if "plain_mlp" in family.always else ()
    activation = values.get(key, names[0])
    if activation not in (*names, *others):
        raise UserError(f"{key} {activation!r} is not supported; supported is {', '.join(others or names[:1])}")
    for key, wanted in family.needed.items():
        wanted = values.get(wanted) if isinstance(wanted, str) else wanted
        if values.get(key) not in (None, wanted):
            raise UserError(f"{key} {values[key]!r} is not supported; supported is {wanted}")
    for key in family.refused:
        if values.get(key):
            raise UserError(f"{key} {values[key]!r} is not supported; use a model without it")
    values = {"rms_norm_eps": 1e-6, **family.defaults, **values}
    keys = {key: family.keys.get(key, key) for key in (*_SIZES, *_OTHERS)}
    experts: dict[str, Any] = experts_in(values, family)
    hidden_size, num_heads = (integer(values, keys[key]) for key in ("hidden_size", "num_attention_heads"))
    if values.get("head_dim") is None:
        values["head_dim"] = hidden_size // max(num_heads, 1)
    if values.get(keys["intermediate_size"]) is None and keys["intermediate_size"] in family.defaults:
        values[keys["intermediate_size"]] = 4 * hidden_size
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = num_heads
    sizes: dict[str, Any] = {name: integer(values, keys[key]) for key, name in _SIZES.items()}
    local_theta = local_theta_in(values, family) if LOCAL_THETA in family.defaults else None
    theta, scaling, rotary_factor = rope_in(values, family)
    without_rope = layers_without_rope_in(values, family, sizes["num_layers"])
    sliding_window, sliding_layers = windows_in(values, family, sizes["num_layers"], without_rope)
    eos, context = values.get("eos_token_id"), integer(values, keys["max_position_embeddings"])
    caps: dict[str, Any] = {of: number(values, key) for key, of in family.caps.items() if values[key] is not None}
    switches = {field: bool(values.get(key, False)) for key, fields in family.switches.items() for field in fields}
    return ModelConfig(
        model_type=name,
        **sizes,
        **dict.fromkeys(family.always, True),
        **switches,
        **experts,
        norms=family.norms,
        local_rope_theta=local_theta,
        activation=names[0] if activation in names else activation,
        **{field: values[key] for key, field in family.numbers.items() if number(values, key)},
        **caps,
        kept={key: values[key] for key in family.kept if key in values},
        rms_norm_eps=number(values, keys["rms_norm_eps"]),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=context,
        num_positions=0 if family.positions is None else context + family.positions,
        tie_embeddings=bool(values.get("tie_word_embeddings", False)),
        sliding_window=sliding_window,
        sliding_layers=sliding_layers,
        layers_without_rope=without_rope,
        rotary_factor=rotary_factor,
        bos_token_id=token_id(values, "bos_token_id"),
        eos_token_ids=token_ids(eos),
        pad_token_id=token_id(values, "pad_token_id"),
    )


def to_hf(config: ModelConfig, *, head: str, dtype: str) -> dict[str, Any]:
    """Returns the contents of a config.json for AutoModelForCausalLM ("lm") or, with one label, for
    AutoModelForSequenceClassification ("scalar").

    dtype: as transformers names it, e.g. "float32".
    """
    family, eos = FAMILIES[config.model_type], config.eos_token_ids
    architecture = f"{family.prefix}{family.causal}"
    if head == "scalar":
        architecture = f"{family.classifier or family.prefix}ForSequenceClassification"
    scaling = {key: value for key, value in (config.rope_scaling or {}).items() if key != "type"}
    scaling = scaling | {"rope_type": config.rope_type}
    if family.partial_rotary:
        scaling["partial_rotary_factor"] = config.rotary_factor
    values = {
        "architectures": [architecture],
        "model_type": config.model_type,
        "dtype": dtype,
        **{key: getattr(config, name) for key, name in _SIZES.items()},
        family.activation[0]: config.activation,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": _rope_to_hf(config, scaling),
        # The same for versions before transformers 5, which would silently assume 10000 and no scaling.
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling if config.rope_type != "default" else None,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "pad_token_id": config.pad_token_id,
    }
    values |= {key: getattr(config, fields[0]) for key, fields in family.switches.items()}
    has_rope = [int(layer not in config.layers_without_rope) for layer in range(config.num_layers)]
    values |= dict.fromkeys(family.without_rope[:1], has_rope)
    if family.partial_rotary:
        values[family.partial_rotary] = config.rotary_factor
    values |= {key: getattr(config, field) for key, field in {**family.numbers, **family.caps}.items()}
    if config.local_rope_theta is not None:
        values[LOCAL_THETA] = config.local_rope_theta
    values |= _sliding_to_hf(config, family) | _experts_to_hf(config, family) | config.kept
    if config.num_positions:
        values = {key: value for key, value in values.items() if not key.startswith("rope_")}
    values |= {theirs: values.pop(key) for key, theirs in family.keys.items()}
    if head == "scalar":
        values |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return values


def _rope_to_hf(config: ModelConfig, scaling: dict[str, Any]) -> dict[str, Any]:
    """Returns rope_parameters."""
    most = scaling | {"rope_theta": config.rope_theta}
    if config.local_rope_theta is None:
        return most
    local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    return {"full_attention": most, "sliding_attention": local}


def token_ids(given: int | list[int] | None, key: str = "eos_token_id") -> tuple[int, ...]:
    """Converts what Hugging Face has under a key, none, one or several ids, to a tuple. Raises UserError."""
    if given is None:
        return ()
    ids = tuple(given) if isinstance(given, list) else (given,)
    if not all(type(token_id) is int for token_id in ids):  # True is no token
        raise UserError(f"{key} is {given!r}, but must be one or several whole numbers")
    return ids


def _sliding_to_hf(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns what the keys of a family say about windows."""
    sliding, layers = config.sliding_layers, range(config.num_layers)
    values = {
        "use_sliding_window": bool(sliding),
        "sliding_window": config.sliding_window if sliding or len(family.windows) > 1 else None,
        "max_window_layers": min(sliding, default=config.num_layers),
        "layer_types": ["sliding_attention" if layer in sliding else "full_attention" for layer in layers],
    }
    return {key: values[key] for key in family.windows}


def _experts_to_hf(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns what the keys of a family say about experts."""
    dense = zip(family.first_dense, ([*range(config.num_dense_layers)], 1), strict=False)
    return {key: getattr(config, field) for key, field in family.sizes.items()} | dict(dense)
