"""The options of `generate`, given as KEY=VALUE words. Imports neither torch nor MPI, so errors appear at once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, JsonValue, NonNegativeInt, PositiveInt

from rlhf_spmd.algorithms.page import NonNegative
from rlhf_spmd.config import options as configs
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.option_tree import OptionTree, Setting, options_of, settings_of, with_settings
from rlhf_spmd.pages.option_values import TEMPLATE_KWARGS, check_template_kwargs
from rlhf_spmd.plan.calls import check_temperature


@dataclass(frozen=True, slots=True)
class OfflineGeneration(configs.Generation):
    """As in training, except that greedy decoding is allowed, and top_p and min_p need no top_k, because nothing is
    stored for replay."""

    temperature: NonNegative = 1.0  # sampling temperature, which divides the logits; 0: the most likely token is taken


@dataclass(frozen=True, slots=True)
class OfflineData:
    key: str = ""  # column (in JSON: key) that holds the prompt; empty: `prompt`
    chat_template: str = ""  # file of a Jinja chat template for prompts given as messages; empty: the tokenizer's own
    # variables that the chat template gets for every row; empty: none
    chat_template_kwargs: Mapping[str, JsonValue] = field(default_factory=dict)
    # limit on the length of a prompt, in tokens; 0: the model's context less max_new_tokens
    max_prompt: NonNegativeInt = 0
    # what to do with a prompt longer than data.max_prompt: stop with an error, keep its last tokens, or drop it
    long_prompts: Literal["error", "truncate", "drop"] = "error"


@dataclass(frozen=True, slots=True)
class GenerateOptions(OptionTree):
    """One run of `generate`."""

    NO_OPTIONS = ("started",)
    started: str = ""  # the time of the start, which chat templates write; set by the program
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0  # seed of the random numbers that sample tokens
    dtype: Literal["float32", "bfloat16"] = "float32"  # precision of the weights and of the computation
    # library for matmuls on a CPU; auto: the fastest one on this machine, measured once
    products: configs.Products = "auto"
    # device to compute on; auto: a GPU if there is one; shared: ranks share GPUs, with messages through host memory
    device: configs.DeviceChoice = "auto"
    tp: PositiveInt = 1  # number of tensor-parallel ranks of one copy of the model
    samples_per_prompt: PositiveInt = 1  # number of responses to each prompt
    # reward function, or folder of a reward model: only the best sample of a prompt is written; empty: all are
    best_of: str = ""
    # number of seconds without activity after which a job counts as hung
    deadline_s: Annotated[float, Field(gt=0, le=10**6)] = 60.0
    data: OfflineData = OfflineData()
    generation: OfflineGeneration = OfflineGeneration()


OPTIONS = options_of(GenerateOptions())


def load_options(words: Iterable[str], given: Iterable[Setting] = ()) -> GenerateOptions:
    """Reads the options of KEY=VALUE arguments. Raises UserError.

    given: of a file, over which the arguments take precedence.
    """
    return with_settings(GenerateOptions(), [*given, *settings_of(words)])


def check_options(options: GenerateOptions) -> None:
    """Raises UserError if options contradict each other."""
    check_template_kwargs(TEMPLATE_KWARGS, options.data.chat_template_kwargs)
    check_temperature("generation.temperature", options.generation.temperature)
    if options.best_of and options.samples_per_prompt < 2:
        raise UserError(f"best_of={options.best_of} chooses among the samples of a prompt; give samples_per_prompt=8")
