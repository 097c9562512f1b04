"""The configuration of a run: frozen dataclasses, dotted overrides (`ppo.kl_coef=0.02`); and the workload of a run.

Imports neither torch nor MPI, so that `check` starts at once.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, NonNegativeInt, PositiveFloat, PositiveInt

from rlhf_spmd.algorithms.page import Fraction01, NonNegative, Options
from rlhf_spmd.config.lora import Lora, adapted, bases
from rlhf_spmd.config.model_folders import folder_of, same_tokenizer, shape_of_folder
from rlhf_spmd.config.role_shapes import shapes_by_role
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import is_file
from rlhf_spmd.pages.algorithm import Algorithm, load_algorithm
from rlhf_spmd.pages.option_tree import (
    ByName,
    OptionTree,
    Setting,
    assigned,
    options_of,
    settings_of,
    with_settings,
    with_value,
)
from rlhf_spmd.pages.option_values import EPOCHS, ITERATIONS, check_length
from rlhf_spmd.plan.workflow import NOTHING_REPEATED
from rlhf_spmd.plan.workload import HOST_BYTES, SHAPES, ModelShape, Workload

Decaying = Literal["all", "matrices", "linear"]
DeviceChoice = Literal["auto", "cpu", "cuda", "shared"]
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Products = Literal["auto", "linear", "onednn", "native"]  # as in kernels/products.py
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Passes = Annotated[float, Field(ge=0, le=10**6, allow_inf_nan=False)]
LR = "_lr"  # optimizer.ROLE_lr


@dataclass(frozen=True, slots=True)
class DataOptions:
    prompts: str = ""  # file of prompts: .jsonl, .parquet or .txt; several with commas
    weights: tuple[Weight, ...] = ()  # of several files: their shares of each iteration; empty: they are one set
    epochs: Passes = 0.0  # passes through data.prompts, which `iterations` follows from; 0: `iterations` is given
    shuffle: bool = True  # every pass through the prompts has another order; false: that of the files
    key: str = ""  # field (.jsonl) or column (.parquet) that holds the prompt; empty: `prompt`, or as the page says
    turns: Literal["last", "all"] = "last"  # of the assistant in a conversation that an algorithm learns from
    chat_template: str = ""  # file of a Jinja template for prompts that are messages; empty: that of the tokenizer
    chat_template_kwargs: Mapping[str, JsonValue] = field(
        default_factory=dict
    )  # variables of the template, for all rows
    max_prompt: PositiveInt = 128  # most tokens of a prompt
    long_prompts: Literal["error", "truncate", "drop"] = "error"  # what to do with one; truncate keeps its last tokens
    precomputed_logprobs: str = ""  # file of `precompute`, in the place of frozen models' passes over the set


@dataclass(frozen=True, slots=True)
class Generation:
    max_new_tokens: PositiveInt = 128  # most tokens of a response
    min_new_tokens: NonNegativeInt = 0  # no end of sequence is drawn before this many tokens
    temperature: PositiveFloat = 1.0  # at least 1e-6; logits are divided by it, in generation and in every later pass
    top_k: NonNegativeInt = 0  # draw from the k most likely tokens; 0: off
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # draw from the fewest tokens with this total probability
    min_p: Fraction01 = 0.0  # draw from tokens with at least this share of the largest probability
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()  # texts that end a response and stay in it
    max_sequences: PositiveInt = 256  # most sequences that one copy of the actor decodes at once
    block_size: NonNegativeInt = 0  # tokens per block of the KV cache; 0: 16 on a GPU, a whole sequence on a CPU
    cache_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9  # share of the free memory that the KV cache may take


@dataclass(frozen=True, slots=True)
class Optimizer:
    """AdamW, linear warm-up, then a schedule."""

    lr: Annotated[Mapping[str, PositiveFloat], ByName(f"ROLE{LR}")] = field(
        default_factory=dict
    )  # learning rate of each trained model; default: that of the algorithm
    warmup_steps: NonNegativeInt = 0  # optimizer steps in which the learning rate rises from zero
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # learning rate after the warm-up
    beta1: BelowOne = 0.9  # decay of AdamW's first moment
    beta2: BelowOne = 0.95  # decay of AdamW's second moment
    eps: PositiveFloat = 1e-5  # added to the denominator of AdamW
    weight_decay: NonNegative = 0.0  # weight decay of AdamW
    weight_decay_on: Decaying = "all"  # weights that decay; matrices: no norms and biases; linear: no embeddings either
    max_grad_norm: PositiveFloat = 1.0  # gradients are clipped to this global norm


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """A checkpoint is also written at the end of the run and on SIGUSR1 and SIGTERM."""

    every: NonNegativeInt = 10  # iterations between two checkpoints; 0: none while the run goes on
    keep: PositiveInt = 2  # number of newest checkpoints to keep
    best: str = ""  # metric of the evaluation, e.g. mean@1: the checkpoint with the largest one is kept, too


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Responses to prompts of their own are scored before training, every few iterations and at the end."""

    prompts: str = ""  # file of prompts that are not trained on: .jsonl, .parquet or .txt; empty: no evaluation
    precomputed_logprobs: str = ""  # as that of data, for these prompts; needed where data has one
    every: PositiveInt = 10  # iterations between two evaluations
    num_prompts: NonNegativeInt = 0  # most prompts, from the beginning of the file; 0: all
    samples_per_prompt: PositiveInt = 1  # responses to each prompt
    temperature: NonNegative = 0.0  # of these responses; 0: greedy
    max_new_tokens: NonNegativeInt = 0  # most tokens of these responses; 0: as in training
    reward_function: str = ""  # scores these responses; empty: as in training
    right_at: float = 1.0  # a response with at least this score is right, for pass@k
    patience: NonNegativeInt = 0  # evaluations without a better checkpoint.best that end the run; 0: no limit


@dataclass(frozen=True, slots=True)
class RolloutFiles:
    """Every sample of an iteration in files: texts, tokens, scores, and what training read."""

    every: NonNegativeInt = 0  # iterations between two that are written; 0: none
    format: Literal["jsonl", "parquet"] = "jsonl"  # of the files


@dataclass(frozen=True, slots=True)
class Logging:
    aliases: Literal["none", "trl", "verl"] = "none"  # names of another program for the curves, beside our own


DEFAULTS = Options()  # stands for those of the algorithm


@dataclass(frozen=True, slots=True)
class Config(OptionTree):
    """One run. Batch sizes are global but for micro_batch (sequences per forward on one data-parallel shard)."""

    preset: str  # name of the preset; set by `--preset` only
    algorithm: Algorithm = field(default_factory=lambda: load_algorithm("ppo"))  # its page; set by `--algorithm` only
    options: Options = DEFAULTS  # of the algorithm: `NAME.option=VALUE`
    models: Annotated[Mapping[str, str], ByName("models.ROLE")] = field(
        default_factory=dict
    )  # checkpoint folder of each model, by its role
    shape: str = ""  # of a preset without weights, for check and plan: a model shape for all roles, or ROLE=SHAPE,...
    device: DeviceChoice = "auto"  # where ranks compute; shared: ranks share GPUs through host memory
    device_type: str = "cpu"  # device type for forecasts of bytes and seconds, e.g. a100-80g
    reserve: BelowOne | None = None  # share of a GPU's memory that is kept free; none: the calibration's, at least 0.06
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0  # seed of the order of prompts, of tokens and of permutations
    iterations: PositiveInt = 10  # number of iterations: generate, score, train
    dtype: Literal["float32", "bfloat16"] = "float32"  # precision while computing; master weights are float32
    host_bytes: NonNegativeInt = HOST_BYTES  # between GPUs: most bytes of a message of rows through host memory
    products: Products = "auto"  # library of matrix products on a CPU; auto: the fastest here, measured once
    rollout_batch: PositiveInt = 128  # prompts per iteration, over all ranks
    samples_per_prompt: PositiveInt = 1  # responses to each prompt
    mini_batch: PositiveInt = 32  # sequences per optimizer step, over all ranks
    mini_batch_tokens: NonNegativeInt = 0  # most tokens per optimizer step, of responses of the data set; 0: no limit
    micro_batch: PositiveInt = 32  # sequences per forward on one data-parallel shard
    reward_function: str = ""  # a Python function: module:function or file.py:function; several with commas
    reward_weights: tuple[float, ...] = ()  # of several reward functions; empty: 1 for each
    reward_function_mode: Literal["replace", "add"] = "replace"  # replace the reward model, or add to its score
    reward_workers: Annotated[int, Field(ge=0, le=1024)] = 0  # processes for them on each rank that scores; 0: none
    reward_timeout_s: Annotated[float, Field(ge=0, le=10**6)] = 0.0  # seconds of one for a response; 0: no limit
    reward_on_timeout: float = 0.0  # score of a response that has none because time ran out
    parity_tolerance: NonNegative | None = None  # most nats for one token; none: 1e-4 in float32, 2 in bfloat16
    deadline_s: Annotated[float, Field(gt=0, le=10**6)] = 60.0  # seconds of inactivity after which a job counts as hung
    num_samples: NonNegativeInt = 3  # prompts whose responses are shown before and after training
    wandb: str = ""  # project at Weights & Biases; empty: off
    data: DataOptions = DataOptions()
    generation: Generation = Generation()
    optimizer: Optimizer = Optimizer()
    lora: Lora = Lora()
    checkpoint: Checkpointing = Checkpointing()
    eval: Evaluation = Evaluation()
    rollouts: RolloutFiles = RolloutFiles()
    logging: Logging = Logging()
    strategy: dict[str, Any] = field(default_factory=dict)  # options of place(): `strategy.NAME=VALUE`

    OPEN, NO_OPTIONS = ("strategy",), ("algorithm",)

    def group_name(self, field: str) -> str:
        """The name of the group in a field."""
        return self.algorithm.name if field == "options" else field

    def __post_init__(self) -> None:
        roles, name = self.algorithm.roles, self.algorithm.name
        if name in {part.name for part in dataclasses.fields(self)}:
            raise UserError(f"algorithm {name}: {name} is an option of every run; give the file another name")
        usual = {role: lr for role in self.algorithm.trained_roles if (lr := roles[role].lr) is not None}
        rates = {role: self.optimizer.lr.get(role, lr) for role, lr in usual.items()}
        if self.options is DEFAULTS:
            object.__setattr__(self, "options", self.algorithm.options())
        object.__setattr__(self, "models", {role: self.models.get(role, "") for role in roles})
        object.__setattr__(self, "optimizer", dataclasses.replace(self.optimizer, lr=rates))
        object.__setattr__(self, "lora", self.lora.with_roles(usual))

    @property
    def main_role(self) -> str:
        """The first role: its folder has the tokenizer, and `--model` names it."""
        return next(iter(self.algorithm.roles))

    @property
    def main_folder(self) -> str:
        return self.models[self.main_role]

    @property
    def title(self) -> str:
        """The preset, and the shapes of its models if they differ."""
        return f"{self.preset} ({self.shape})" if "=" in self.shape else self.preset

    @property
    def only_function(self) -> bool:
        """Whether the reward function replaces the reward model."""
        return bool(self.reward_function) and self.reward_function_mode == "replace"

    def folder(self, role: str) -> str:
        """The folder of a role; empty if a reward function replaces the role, or if no folder is known."""
        roles = self.algorithm.roles
        return "" if roles[role].judge and self.only_function else folder_of(role, self.models, roles)

    @property
    def tokenizer_folders(self) -> list[str]:
        """The folders of the tokenizers of a run: the first role's, and those of judges that have another one."""
        judges = filter(None, (self.folder(role) for role, about in self.algorithm.roles.items() if about.judge))
        others = [folder for folder in judges if not same_tokenizer(folder, self.main_folder)]
        return list(dict.fromkeys(filter(None, [self.main_folder, *others])))


def split_functions(text: str) -> list[str]:
    """The reward functions that an option names."""
    return [part.strip() for part in text.split(",") if part.strip()]


def prompt_files(config: Config) -> list[str]:
    """The files that data.prompts names. A comma may be a part of the name of a single file."""
    text = config.data.prompts
    return [text] if is_file(text) else [part.strip() for part in text.split(",") if part.strip()]


def function_labels(config: Config) -> list[str]:
    """The names of several reward functions in the log: without their modules; none for one function."""
    found = function_names(config)
    return found if len(found) > 1 else []


def function_names(config: Config) -> list[str]:
    """The names of the reward functions, without their modules."""
    return [spec.rpartition(":")[2] for spec in split_functions(config.reward_function)]


def overridden(config: Config, overrides: Iterable[str], given: Sequence[Setting] = ()) -> Config:
    """The config with the settings of a file, then with dotted overrides, of which only those of the length are checked
    against each other. Raises UserError."""
    words = settings_of(overrides)
    check_length({one.key: one.value for one in words})
    return with_settings(config, [*given, *words], _assigned)


def _assigned(config: Config, one: Setting) -> Config:
    """A copy with one option set. Raises UserError for an unknown key or a wrong value."""
    group, _, name = one.key.partition(".")
    text = "none" if one.value is None else one.value if isinstance(one.value, str) else ",".join(one.value)
    if group == "strategy":
        if not name or "." in name or name == "name":
            raise UserError(
                f"{one.key}: strategy options are set as strategy.NAME=value; the strategy itself by --strategy"
            )
        return dataclasses.replace(config, strategy={**config.strategy, name: text})
    if one.key in ("preset", "algorithm"):
        what = "preset is what the overrides change" if group == "preset" else "options are those of the algorithm"
        raise UserError(f"{one.key}={text}: the {what}; choose it by --{group} {text}")
    config = assigned(config, one)
    return with_value(config, EPOCHS, 0.0) if one.key == ITERATIONS else config  # the later one of the two counts


def evaluated(config: Config) -> Config:
    """The options of the evaluation in a run, in the places of those of training."""
    evaluation, generation = config.eval, config.generation
    max_new_tokens = evaluation.max_new_tokens or generation.max_new_tokens
    # the number of prompts is known before they are tokenised, so none is dropped
    long_prompts = "truncate" if config.data.long_prompts == "drop" else config.data.long_prompts
    shortest = min(generation.min_new_tokens, max_new_tokens)
    own: dict[str, Any] = {
        "data": dataclasses.replace(
            config.data,
            prompts=evaluation.prompts,
            weights=(),
            epochs=0.0,
            long_prompts=long_prompts,
            precomputed_logprobs=evaluation.precomputed_logprobs,
        ),
        "generation": dataclasses.replace(generation, max_new_tokens=max_new_tokens, min_new_tokens=shortest),
    }
    if evaluation.reward_function:
        own |= {"reward_function": evaluation.reward_function, "reward_function_mode": "replace", "reward_weights": ()}
    return dataclasses.replace(config, **own)


def resolved(config: Config, *, algorithm: str | None = None, strategy: str | None = None) -> dict[str, Any]:
    """The config as plain JSON values, options in their groups. algorithm, strategy: how to name them (None: the
    algorithm by its name, the strategy not at all)."""
    found: dict[str, Any] = {"algorithm": algorithm or config.algorithm.name}
    for key, one in options_of(config).items():
        group, dot, name = key.partition(".")
        (found.setdefault(group, {}) if dot else found)[name or group] = one.value
    named = {"name": strategy} if strategy else {}
    values: dict[str, Any] = json.loads(json.dumps(found | {"strategy": named | config.strategy}))
    return values


def leaves(config: Config) -> dict[str, str]:
    """Every option as text by its dotted key, for comparing."""
    values = {"algorithm": config.algorithm.name} | {key: one.value for key, one in options_of(config).items()}
    values |= {f"strategy.{name}": value for name, value in config.strategy.items()}
    return {key: str(json.loads(json.dumps(value, sort_keys=True))) for key, value in values.items()}


def make_workload(config: Config) -> Workload:
    """The workload that strategies and the compiler see."""
    roles = config.algorithm.roles
    workflow = config.algorithm.workflow(config.options, replay=config.generation.top_k > 0)
    if config.data.precomputed_logprobs:
        if not workflow.repeated_calls:
            raise UserError(f"data.precomputed_logprobs: {NOTHING_REPEATED}; drop the option")
        workflow = workflow.without(workflow.repeated_calls)
    shapes: dict[str, ModelShape | None] = {}
    known = shapes_by_role(config.shape, roles)
    for role in (name for name in roles if name in workflow.models):
        if known[role] and not config.models[role]:
            shape = SHAPES[known[role]]
        elif roles[role].judge and config.only_function:
            shapes[role] = None
            continue
        else:
            shape = shape_of_folder(_known_folder(config, role))
        shape = dataclasses.replace(shape, scalar_head=roles[role].head == "scalar")
        if workflow.train_call(role) and (adapters := config.lora.of(role)):
            shape = adapted(role, shape, adapters)
        shapes[role] = shape
    return Workload(
        workflow=workflow,
        models=shapes,
        rollout_batch=config.rollout_batch,
        samples_per_prompt=config.samples_per_prompt,
        mini_batch=config.mini_batch,
        micro_batch=config.micro_batch,
        epochs=config.options.epochs,
        max_prompt=config.data.max_prompt,
        max_response=config.generation.max_new_tokens,
        param_bytes={"float32": 4, "bfloat16": 2}[config.dtype],
        max_kept=config.generation.top_k,
        max_sequences=config.generation.max_sequences,
        host_bytes=config.host_bytes,
        bases=bases(shapes, roles, config.folder),
    )


def _known_folder(config: Config, role: str) -> str:
    """The folder of a role. Raises UserError if none is known."""
    if folder := config.folder(role):
        return folder
    if role == config.main_role:
        raise UserError(f"preset {config.preset} has no {role}; pass --model FOLDER")
    if config.shape:
        raise UserError(f"shape={config.shape} gives no shape of {role}; add {role}=SHAPE")
    instead = " or reward_function=module:function" if config.algorithm.roles[role].judge else ""
    raise UserError(f"there is no {role}: give models.{role}=FOLDER{instead}")
