"""The options of `generate`, given as KEY=VALUE words. Imports neither torch nor MPI, so errors appear at once."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, JsonValue, NonNegativeInt, PositiveInt

from rlhf_spmd.algorithms.page import NonNegative
from rlhf_spmd.config import options as configs
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.option_suggestions import suggest_option
from rlhf_spmd.pages.option_values import TEMPLATE_KWARGS, Given, check_template_kwargs, parse_value
from rlhf_spmd.plan.workflow import check_temperature


@dataclass(frozen=True, slots=True)
class OfflineGeneration(configs.Generation):
    """As in training, except that greedy decoding is allowed, and top_p and min_p need no top_k, because nothing is
    stored for replay."""

    temperature: NonNegative = 1.0  # logits are divided by it; 0: the most likely token


@dataclass(frozen=True, slots=True)
class OfflineData:
    key: str = ""  # field (.jsonl) or column (.parquet) that holds the prompt; empty: `prompt`
    chat_template: str = ""  # file of a Jinja template for prompts that are messages; empty: that of the tokenizer
    chat_template_kwargs: Mapping[str, JsonValue] = field(
        default_factory=dict
    )  # variables of the template, for all rows
    max_prompt: NonNegativeInt = 0  # limit of tokens in a prompt; 0: the model's context less max_new_tokens
    long_prompts: Literal["error", "truncate", "drop"] = "error"  # for longer prompts; truncate keeps the last tokens


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """One run of `generate`."""

    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0  # seed of the random numbers
    dtype: Literal["float32", "bfloat16"] = "float32"  # precision of the weights
    products: configs.Products = "auto"  # library of matrix products on a CPU; auto: the fastest here, measured once
    device: configs.DeviceChoice = "auto"  # where ranks compute; shared: ranks share GPUs through host memory
    tp: PositiveInt = 1  # tensor-parallel ranks of one copy of the model
    samples_per_prompt: PositiveInt = 1  # responses to each prompt
    best_of: str = ""  # a reward function, or a reward model's folder: only the best sample of a prompt is written
    deadline_s: Annotated[float, Field(gt=0, le=10**6)] = 60.0  # seconds of inactivity after which a job counts as hung
    data: OfflineData = OfflineData()
    generation: OfflineGeneration = OfflineGeneration()


def load_options(words: Iterable[str], options: GenerateOptions = GenerateOptions()) -> GenerateOptions:
    """The options with KEY=VALUE words over them; later words win. Raises UserError for an unknown key or a bad
    value."""
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"override {word!r} is not of the form key=value, e.g. generation.temperature=0.7")
        options = assigned(options, key, text)
    return options


def assigned(options: GenerateOptions, key: str, given: Given) -> GenerateOptions:
    """A copy with one option set. Raises UserError for an unknown key or a bad value."""
    known = types()
    if key not in known:
        raise UserError(f"unknown key {key!r}{suggest_option(key, (), list(known))}; known: {', '.join(known)}")
    value = parse_value(known[key], given, key)
    group, _, name = key.rpartition(".")
    part = dataclasses.replace(getattr(options, group), **{name: value}) if group else value
    return dataclasses.replace(options, **{group or name: part})


def check_options(options: GenerateOptions) -> None:
    """Raises UserError if options contradict each other."""
    check_template_kwargs(TEMPLATE_KWARGS, options.data.chat_template_kwargs)
    check_temperature("generation.temperature", options.generation.temperature)
    if options.best_of and options.samples_per_prompt < 2:
        raise UserError(f"best_of={options.best_of} chooses among the samples of a prompt; give samples_per_prompt=8")


@functools.cache
def types() -> dict[str, Any]:
    """The type of every option, by its key."""
    found: dict[str, Any] = {}
    for name, kind in get_type_hints(GenerateOptions, include_extras=True).items():
        parts = get_type_hints(kind, include_extras=True) if dataclasses.is_dataclass(kind) else {}
        found |= {f"{name}.{leaf}": of_leaf for leaf, of_leaf in parts.items()} or {name: kind}
    return found
