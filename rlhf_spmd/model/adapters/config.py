"""The description of an adapter: peft's adapter_config.json. Plain Python without torch.

An adapted layer computes y = W x + s B A x with s = alpha / r, or alpha / sqrt(r) with rslora (LoRA, arXiv 2106.09685;
rank-stabilised, arXiv 2312.03732). Layers are named by Hugging Face's paths, such as model.layers.0.self_attn.q_proj.
How targets and patterns match them is what peft 0.17 to 0.21 do. A key of peft's that changes the mathematics in
another way is refused by name, and so is every unknown one that says something.
"""

import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]  # that of `re`
from typing import Any, Literal, TypeGuard

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import is_folder

CONFIG = "adapter_config.json"
TASKS = ("CAUSAL_LM", "SEQ_CLS")
SCORES = ("score", "classifier")  # what peft trains beside the factors of a SEQ_CLS adapter, without being told
READ = (
    *("peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "rank_pattern"),
    *("alpha_pattern", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    "lora_dropout",
)
INERT = (  # they say what made the adapter, how it was trained, how a base is stored, or what other keys would need
    *("auto_mapping", "peft_version", "revision", "inference_mode", "megatron_core"),
    *("qalora_group_size", "runtime_config", "fan_in_fan_out"),
)
INITIAL = (None, True, False, "gaussian", "orthogonal")  # ways to begin that leave the base as it is
EXPRESSION_OF_ALL = "all-linear"  # of which peft leaves out the output
LONGEST = 500  # characters of a text that can match: the path of a layer has some 50
SINGLE = ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT")  # parts of an expression without a choice
MOST_CHOICES = 14  # of an expression: those of vision models have 12
OUTER = ("model.embed_tokens", "lm_head")  # what can be adapted outside the layers


def merge_with_peft(folder: Path | str) -> str:
    """Advises how to make a whole model of an adapter that is not supported here."""
    load = f"AutoPeftModelForCausalLM.from_pretrained('{folder}')"
    return f"merge it with peft: {load}.merge_and_unload().save_pretrained('MERGED'), and give that folder"


def merge_here(folder: Path | str) -> str:
    """Advises how to make a whole model of an adapter that a run does not have."""
    return f"merge it: python -m rlhf_spmd convert {folder} MERGED --merge, and give MERGED"


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A LoRA adapter without its numbers. Raises UserError for a rank, an alpha, a pattern or a task that cannot be.

    targets: paths of layers, or their last parts.
    rank_pattern, alpha_pattern: regular expressions for the end of a path -> the rank or alpha of these layers; the
        first that matches counts.
    modules_to_save: ends of the paths of modules of which a trained copy is stored as a whole; an end need not be a
        whole part of a path (`norm` means input_layernorm, too).
    base: the folder of its base, as peft wrote it.
    """

    rank: int = 8
    alpha: float = 8
    rslora: bool = False
    targets: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict, hash=False)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict, hash=False)
    modules_to_save: tuple[str, ...] = ()
    task_type: str = "CAUSAL_LM"
    base: str = ""
    dropout: float = 0.0  # with which it was trained

    def __post_init__(self) -> None:
        ranks = {"r": self.rank, **self.rank_pattern}
        numbers = {"lora_alpha": self.alpha, "lora_dropout": self.dropout, **self.alpha_pattern}
        wrong = [name for name, rank in ranks.items() if type(rank) is not int or rank < 1]
        wrong += [name for name, number in numbers.items() if not _is_number(number)]
        if wrong:
            raise UserError(
                f"an adapter has {wrong[0]} {(ranks | numbers)[wrong[0]]!r}: ranks are whole numbers from 1 on, alphas "
                "and dropout numbers of float32"
            )
        self.rank_of(""), self.alpha_of("")  # so that wrong patterns are named
        if self.task_type not in TASKS:
            raise UserError(f"task_type is {self.task_type!r}, but must be {' or '.join(TASKS)}")

    @property
    def head(self) -> Literal["lm", "scalar"]:
        """The head of the model that it adapts."""
        return "lm" if self.task_type == "CAUSAL_LM" else "scalar"

    def adapts(self, path: str) -> bool:
        """Returns whether a layer is a target."""
        return named(path, self.targets)

    def rank_of(self, path: str) -> int:
        """Returns the rank r of a layer's factors."""
        return _by_pattern(self.rank_pattern, path, self.rank)

    def alpha_of(self, path: str) -> float:
        """Returns the alpha of a layer's factors."""
        return _by_pattern(self.alpha_pattern, path, self.alpha)

    def scale_of(self, path: str) -> float:
        """Returns the factor of a layer's product B A."""
        alpha, rank = self.alpha_of(path), self.rank_of(path)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def saves(self, tensor: str) -> bool:
        """Returns whether a tensor belongs to a module that is stored as a whole."""
        parts = tensor.split(".")
        known = (*self.modules_to_save, *(SCORES if self.task_type == "SEQ_CLS" else ()))
        return any(".".join(parts[:length]).endswith(known) for length in range(1, len(parts)))


def named(path: str, names: Collection[str]) -> bool:
    """Returns whether one of these names means a module: its whole path, or the last parts of it."""
    return path in names or any(path.endswith(f".{name}") for name in names)


def from_peft(values: Mapping[str, Any], paths: Sequence[str], folder: Path | str = "FOLDER") -> AdapterConfig:
    """Reads the contents of an adapter_config.json. Raises UserError naming the key.

    paths: the layers whose factors are stored beside it; they become the targets where the file gives these by an
        expression, or takes layers out of them.
    folder: for messages.
    """
    _refuse(values, folder)
    targets = values.get("target_modules") or ()
    if outside := [path for path in paths if not is_target(values, path)]:
        raise UserError(f"target_modules does not name {outside[0]}, whose factors are stored beside it; {_AGAIN}")
    listed = not isinstance(targets, str) and not any(values.get(key) for key in ("exclude_modules", "layers_pattern"))
    if not listed or values.get("layers_to_transform") is not None:
        targets = paths
    saved = values.get("modules_to_save") or ()
    task = values.get("task_type")
    if task is None:
        task = "SEQ_CLS" if set(SCORES) & set(saved) else "CAUSAL_LM"
    return AdapterConfig(
        rank=values.get("r", 8),
        alpha=values.get("lora_alpha", 8),
        rslora=bool(values.get("use_rslora", False)),
        targets=tuple(sorted(targets)),
        rank_pattern=values.get("rank_pattern") or {},
        alpha_pattern=values.get("alpha_pattern") or {},
        modules_to_save=tuple(sorted(saved)),
        task_type=task,
        base=values.get("base_model_name_or_path") or "",
        dropout=values.get("lora_dropout") or 0.0,
    )


def to_peft(config: AdapterConfig) -> dict[str, Any]:
    """Returns the contents of an adapter_config.json, which peft 0.17 and later read."""
    return {
        "peft_type": "LORA",
        "task_type": config.task_type,
        "base_model_name_or_path": config.base or None,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.rslora,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
        "target_modules": list(config.targets),
        "modules_to_save": list(config.modules_to_save) or None,
        "lora_dropout": config.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def base_of(folder: Path, config: AdapterConfig, given: Path | str | None, *, option: str) -> Path:
    """Returns the folder of an adapter's base: the given one, or the one that its description names, relative to the
    working directory, to the adapter's folder or to the folder around it. Raises UserError.

    option: what gives it, for the message.
    """
    places = (Path(config.base), folder / config.base, folder.parent / config.base) if config.base else ()
    found = Path(given) if given else next((path for path in places if is_folder(path)), None)
    if found is None:
        which = f"{config.base}, which is not a folder here" if config.base else "a base that it does not name"
        raise UserError(f"{folder} holds an adapter for {which}; give the folder of the base: {option}")
    return found


_AGAIN = "the two files do not belong together: copy both again"


def _refuse(values: Mapping[str, Any], folder: Path | str) -> None:
    """Raises UserError for what changes the mathematics and is not supported, and for values of a wrong type."""
    kind, start = values.get("peft_type"), values.get("init_lora_weights")
    if kind != "LORA":
        raise UserError(f"peft_type is {kind!r}, and only LORA is supported; {merge_with_peft(folder)}")
    if start not in INITIAL:
        raise UserError(
            f"init_lora_weights is {start!r}, which may have changed the base; let peft turn it into plain LoRA: "
            "save_pretrained(FOLDER, path_initial_model_for_weight_conversion=START)"
        )
    known = (*READ, *INERT, "init_lora_weights")
    wrong = [key for key, value in values.items() if key not in known and value and (key, value) != ("bias", "none")]
    if wrong:
        raise UserError(f"{wrong[0]} is {values[wrong[0]]!r}, which is not supported; {merge_with_peft(folder)}")
    for key, types in _TYPES.items():
        value = values.get(key)
        names = value if key.endswith(("_modules", "_to_save")) and isinstance(value, list) else []
        if (value is not None and not isinstance(value, types)) or not all(isinstance(name, str) for name in names):
            raise UserError(f"{key} is {value!r}, which peft does not write; correct it")


_TYPES: dict[str, tuple[type, ...]] = {
    "target_modules": (list, str),
    "exclude_modules": (list, str),
    "layers_pattern": (list, str),
    "layers_to_transform": (list, int),
    "modules_to_save": (list,),
    "rank_pattern": (dict,),
    "alpha_pattern": (dict,),
    "base_model_name_or_path": (str,),
}


def is_target(values: Mapping[str, Any], path: str) -> bool:
    """Returns whether peft adapts a layer (check_target_module_exists of its tuners_utils.py)."""
    targets, excluded = values.get("target_modules") or (), values.get("exclude_modules") or ()
    if isinstance(excluded, str) and excluded and matches(excluded, path):
        return False
    if not isinstance(excluded, str) and named(path, excluded):
        return False
    if isinstance(targets, str):
        return path not in OUTER if targets.lower() == EXPRESSION_OF_ALL else matches(targets, path)
    if path in targets:
        return True
    if not named(path, targets):
        return False
    layers = values.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    patterns = values.get("layers_pattern") or ()
    patterns = [patterns] if isinstance(patterns, str) else patterns
    number = re.search(r"\.(\d{1,9})\.", path)
    if number is None or int(number[1]) not in ([layers] if isinstance(layers, int) else layers):
        return False
    return not patterns or any(matches(rf"(.*\.)?{one}", path[: number.start()]) for one in patterns)


def _by_pattern(pattern: Mapping[str, Any], path: str, otherwise: Any) -> Any:
    """Returns the value of the first expression that matches the end of a path (get_pattern_key of peft's other.py)."""
    return next((value for key, value in pattern.items() if matches(rf"(.*\.)?({key})", path)), otherwise)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2.0**128  # of float32


# ---- regular expressions from the folders of others -----------------------------------------------------------------


@functools.lru_cache(maxsize=2**16)
def matches(expression: str, text: str) -> bool:
    """Returns whether an expression matches a whole text. Raises UserError for a wrong one, and for one with which `re`
    could try for ever, such as (a+)+b."""
    try:
        if _num_choices(_parser.parse(expression)) > MOST_CHOICES:
            raise re.error("it has too many choices")
        return len(text) <= LONGEST and re.fullmatch(expression, text) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(
            f"the pattern {expression[:99]!r} is not a regular expression that is read here ({error}); correct it, or "
            "name the layers"
        ) from None


def _num_choices(parts: Any) -> int:
    """Returns how many times an expression lets `re` choose one after the other; a repetition counts twice. Raises
    re.error for a choice that is repeated."""
    num = 0
    for part, value in parts:
        kind = str(part)
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = value
            inside = _num_choices(inner)
            if inside and most > 1:
                raise re.error("it repeats a choice")
            num += inside + 2 * (least != most)
        elif kind == "BRANCH":
            num += 1 + max(map(_num_choices, value[1]))
        elif kind in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
            num += _num_choices(value[-1])
        elif kind not in SINGLE:
            raise re.error(f"it has a part of the kind {kind}")
    return num
