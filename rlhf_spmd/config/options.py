"""The configuration of a run: frozen dataclasses, dotted overrides (`ppo.kl_coef=0.02`); and the workload of a run.

Imports neither torch nor MPI, so that `check` starts at once.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rlhf_spmd.algorithms.page import Fraction01, NonNegative, Options
from rlhf_spmd.config.forecast_options import read_forecast_episodes, read_forecast_lengths
from rlhf_spmd.config.lora import Lora, RoleLora, adapted, bases, of_folder
from rlhf_spmd.config.model_folders import folder_of, shape_of_folder
from rlhf_spmd.config.role_shapes import shapes_by_role
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.data_files import KNOWN, named_parts
from rlhf_spmd.model.adapters.uniform import ModelFiles, adapters_in, model_files, same_model
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
from rlhf_spmd.pages.option_values import EPOCHS, ITERATIONS
from rlhf_spmd.plan.adapters import Adapters
from rlhf_spmd.plan.calls import NOTHING_REPEATED, Workflow
from rlhf_spmd.plan.workload import HOST_BYTES, SHAPES, Answers, ModelShape, Workload

Decaying = Literal["all", "matrices", "linear"]
DeviceChoice = Literal["auto", "cpu", "cuda", "shared"]
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Products = Literal["auto", "linear", "onednn", "native"]  # as in kernels/products.py
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Passes = Annotated[float, Field(ge=0, le=10**6, allow_inf_nan=False)]
SIZES = ("rollout_batch", "samples_per_prompt", "mini_batch", "micro_batch", "host_bytes")  # as a workload has them
LR = "_lr"  # optimizer.ROLE_lr
OLD = "old_logprobs"  # of the options of an algorithm with a policy loss (algorithms/off_policy.py)


@dataclass(frozen=True, slots=True)
class DataOptions:
    # file, folder or pattern of training rows, such as prompts (.jsonl, .json, .csv, .parquet, .txt); separate several
    # by commas; empty: none, which is enough for check and plan
    prompts: str = ""
    # share of each file of data.prompts in an iteration, one number per file; empty: the files form one set
    weights: tuple[Weight, ...] = ()
    # number of passes over data.prompts, which sets `iterations`; 0: `iterations` sets the length of the run
    epochs: Passes = 0.0
    shuffle: bool = True  # shuffle the rows anew in every pass; false: keep the order of the files
    # column (in JSON: key) that holds the prompt; empty: `prompt`, or the one that the algorithm names
    key: str = ""
    turns: Literal["last", "all"] = "last"  # assistant turns of a conversation to learn from: the last one, or all
    chat_template: str = ""  # file of a Jinja chat template for prompts given as messages; empty: the tokenizer's own
    # variables that the chat template gets for every row; empty: none
    chat_template_kwargs: Mapping[str, JsonValue] = field(default_factory=dict)
    max_prompt: PositiveInt = 128  # limit on the length of a prompt, in tokens
    # what to do with a prompt longer than data.max_prompt: stop with an error, keep its last tokens, or drop the row;
    # responses of a data set longer than generation.max_new_tokens alike, but truncate keeps their first tokens
    long_prompts: Literal["error", "truncate", "drop"] = "error"
    # compute the logprobs that frozen models, such as DPO's reference, give the responses of the data set once, at the
    # start of the run, into its folder; false: in every iteration
    precompute: bool = False
    # folder of another run with data.precompute, whose logprobs are read instead; empty: none
    precomputed_logprobs: str = ""


@dataclass(frozen=True, slots=True)
class Generation:
    max_new_tokens: PositiveInt = 128  # limit on the length of a response, in tokens
    # number of tokens before which no end of sequence is sampled; 0: it may come at once
    min_new_tokens: NonNegativeInt = 0
    # sampling temperature, at least 1e-6; divides the logits in generation and in every later pass
    temperature: PositiveFloat = 1.0
    top_k: NonNegativeInt = 0  # sample from the k most likely tokens; 0: from all
    # sample from the smallest set of most likely tokens with this total probability; 1: from all
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    # sample from the tokens with at least this fraction of the largest probability; 0: from all
    min_p: Fraction01 = 0.0
    # texts that end a response and stay in it, separated by commas; empty: only the end of sequence ends it
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    max_sequences: PositiveInt = 256  # limit on the number of sequences that one copy of the model decodes at once
    # size of a block of the KV cache, in tokens; 0: 16 on a GPU, a whole sequence on a CPU
    block_size: NonNegativeInt = 0
    cache_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9  # fraction of the free memory that the KV cache may take


@dataclass(frozen=True, slots=True)
class Episode:
    """Limits of an episode, a response of several turns that an environment answers, and what ends it otherwise."""

    # limit on the length of an episode, in tokens, of which generation.max_new_tokens may be sampled and all others are
    # answers; 0: generation.max_new_tokens
    max_row_tokens: NonNegativeInt = 0
    max_turns: NonNegativeInt = 0  # limit on the number of turns of an episode; 0: no limit
    max_calls: NonNegativeInt = 0  # limit on the number of tool calls of an episode; 0: no limit
    # time limit in seconds for a tool call, which is then answered with an error; 0: no limit
    tool_timeout_s: Annotated[float, Field(ge=0, le=10**6)] = 60.0
    timeout_s: Annotated[float, Field(ge=0, le=10**6)] = 0.0  # time limit in seconds for an episode; 0: no limit
    # largest number of conversations of an agent's episode; each is a sequence of the batch, with limits of its own;
    # forecasts assume that all are used
    rows: Annotated[int, Field(ge=1, le=1024)] = 1
    # what to do when an environment and its three restarts have failed: stop the run, or drop_group: drop the samples
    # of the prompt from training and evaluation
    on_failure: Literal["stop", "drop_group"] = "stop"


@dataclass(frozen=True, slots=True)
class Optimizer:
    """AdamW, linear warm-up, then a schedule."""

    # learning rate of each trained model; default: the algorithm's
    lr: Annotated[Mapping[str, PositiveFloat], ByName(f"ROLE{LR}")] = field(default_factory=dict)
    # number of optimizer steps in which the learning rate rises from zero; 0: no warm-up
    warmup_steps: NonNegativeInt = 0
    warmup_ratio: BelowOne = 0.0  # warm-up as a fraction of the steps of the run, rounded up; 0: warmup_steps counts
    # learning rate after the warm-up: constant, or falling along a line or a cosine
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: BelowOne = 0.0  # last learning rate of the schedule, as a fraction of the largest; 0: it ends at zero
    beta1: BelowOne = 0.9  # decay rate of AdamW's first moment
    beta2: BelowOne = 0.999  # decay rate of AdamW's second moment
    eps: PositiveFloat = 1e-8  # constant added to the denominator of AdamW's update
    weight_decay: NonNegative = 0.0  # weight decay of AdamW; 0: none
    # weights that decay: all, matrices (neither norms nor biases), or linear layers (no embeddings either)
    weight_decay_on: Decaying = "all"
    max_grad_norm: PositiveFloat = 1.0  # limit on the global gradient norm; larger gradients are scaled down to it
    # under ZeRO 2, sum the gradients of each micro-batch over ranks and keep a part, instead of whole ones of a step
    sum_each_pass: bool = True

    @property
    def length_matters(self) -> bool:
        """Whether learning rates depend on how many steps the run has."""
        return self.schedule != "constant" or self.warmup_ratio > 0


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixtures of experts."""

    # train a mixture with the experts that its tokens took in generation; false: with those that its router chooses
    replay: bool = True
    # weight of the load-balancing loss of routers; 0: none. Where no generation has chosen experts, a loss of routers
    # costs one more forward pass
    balance_coef: NonNegativeFloat = 0.0
    z_coef: NonNegativeFloat = 0.0  # weight of the routers' z-loss, the mean of logsumexp(logits)^2; 0: none


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """A checkpoint is also written at the end of the run and on SIGUSR1 and SIGTERM."""

    # write a checkpoint every N iterations; 0: only at the end of the run, and on SIGUSR1 and SIGTERM
    every: NonNegativeInt = 10
    keep: PositiveInt = 2  # number of newest checkpoints to keep
    # metric of the evaluation, e.g. mean@1, or FUNCTION/mean@1 of one of several reward functions: also keep the
    # checkpoint with its largest value; empty: keep none
    best: str = ""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Responses to prompts of their own are scored before training, every few iterations and at the end."""

    prompts: str = ""  # held-out prompts to evaluate on, named like data.prompts; empty: no evaluation
    every: PositiveInt = 10  # evaluate every N iterations, besides before training and at the end
    at_start: bool = True  # evaluate before training, too
    num_prompts: NonNegativeInt = 0  # number of prompts to evaluate, from the beginning of the file; 0: all
    samples_per_prompt: PositiveInt = 1  # number of responses to each prompt of an evaluation
    temperature: NonNegative = 0.0  # sampling temperature of an evaluation; 0: greedy decoding
    # limit on the length of a response in an evaluation, in tokens; 0: generation.max_new_tokens
    max_new_tokens: NonNegativeInt = 0
    # reward function of an evaluation, as module:function or file.py:function; empty: scores as in training
    reward_function: str = ""
    # smallest score of a response that pass@k counts as right; with 1, pass@k is shown only where all scores are 0 or 1
    right_at: float = 1.0
    # number of evaluations without a better checkpoint.best after which the run ends; 0: never
    patience: NonNegativeInt = 0


@dataclass(frozen=True, slots=True)
class RolloutFiles:
    """Every sample of an iteration in files: texts, tokens, scores, and what training read."""

    every: NonNegativeInt = 0  # write all samples of every Nth iteration to the run folder; 0: write none
    format: Literal["jsonl", "parquet"] = "jsonl"  # file format of the samples that rollouts.every writes


@dataclass(frozen=True, slots=True)
class Logging:
    aliases: Literal["none", "trl", "verl"] = "none"  # log metrics under names of TRL or verl, too; none: only ours
    entity: str = ""  # account or team at Weights & Biases; empty: the default one
    group: str = ""  # group of runs at Weights & Biases; empty: none
    tags: tuple[Annotated[str, Field(min_length=1)], ...] = ()  # tags of the run at Weights & Biases; empty: none


DEFAULTS = Options()  # stands for those of the algorithm


@dataclass(frozen=True, slots=True)
class Config(OptionTree):
    """One run. Batch sizes are global but for micro_batch (sequences per forward on one data-parallel shard)."""

    preset: str  # name of the preset; set by `--preset` only
    algorithm: Algorithm = field(default_factory=lambda: load_algorithm("ppo"))  # its page; set by `--algorithm` only
    options: Options = DEFAULTS  # of the algorithm: `NAME.option=VALUE`
    started: str = ""  # the time of the first start of the run, which chat templates write; set by the program
    run_folder: str = ""  # of this run, once it is there; set by the program
    # checkpoint folder of the model in each role; empty: see the table of the algorithm
    models: Annotated[Mapping[str, str], ByName("models.ROLE")] = field(default_factory=dict)
    # model size to assume for check and plan when the preset has no weights: one name for all roles, or ROLE=NAME,...;
    # empty: the size of the model folders
    shape: str = ""
    # device to compute on; auto: a GPU if there is one; shared: ranks share GPUs, with messages through host memory
    device: DeviceChoice = "auto"
    device_type: str = "cpu"  # device type that forecasts of memory and time assume, e.g. a100-80g
    # lengths of responses that forecasts assume: MEAN,SIGMA (lognormal) or the rollouts of a run; empty: the limit
    forecast_lengths: str = ""
    # episodes that forecasts assume: TURNS,TOKENS,MEAN_S,P95_S (tokens and time of answers) or the folder of a run;
    # empty: 2 turns, answers that fill the row, 0.1 s and 0.3 s
    forecast_episodes: str = ""
    forecast_failed_groups: Fraction01 = 0.5  # share of groups that fail in each round, which forecasts assume
    # fraction of a GPU's memory to keep free; none: that of the calibration, at least 0.06
    reserve: BelowOne | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0  # seed of the random order of rows, of sampling and of mini-batches
    iterations: PositiveInt = 10  # number of iterations, each of which generates, scores and trains
    dtype: Literal["float32", "bfloat16"] = "float32"  # precision of the computation; master weights are always float32
    deterministic: bool = False  # whether a run repeats its bits on a GPU, too, with slower backward passes
    # size in bytes up to which a message of rows between GPUs goes through host memory; 0: none does
    host_bytes: NonNegativeInt = HOST_BYTES
    products: Products = "auto"  # library for matmuls on a CPU; auto: the fastest one on this machine, measured once
    rollout_batch: PositiveInt = 128  # number of prompts per iteration, over all ranks
    samples_per_prompt: PositiveInt = 1  # number of responses to each prompt
    # number of tokens that an iteration samples of a response at most; what has not ended by then goes on in the next
    # iteration, and trains when all samples of its prompt have ended (with strategy.ahead=1); 0: each ends at once
    partial_steps: NonNegativeInt = 0
    mini_batch: PositiveInt = 32  # number of sequences per optimizer step, over all ranks
    # limit on the tokens of an optimizer step, for algorithms that learn from responses of the data set; 0: no limit
    mini_batch_tokens: NonNegativeInt = 0
    micro_batch: PositiveInt = 32  # number of sequences per forward pass on one data-parallel shard
    # reward function, as module:function or file.py:function; separate several by commas; empty: none
    reward_function: str = ""
    reward_weights: tuple[float, ...] = ()  # weight of each of several reward functions in the score; empty: 1 each
    # whether reward functions replace the reward model, or add to its score
    reward_function_mode: Literal["replace", "add"] = "replace"
    # worker processes for reward functions on each scoring rank; 0: they run in the rank
    reward_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    # time limit in seconds for a reward function on one response; 0: no limit
    reward_timeout_s: Annotated[float, Field(ge=0, le=10**6)] = 0.0
    reward_on_timeout: float = 0.0  # score of a response whose reward function ran out of time
    # environment or agent that gives responses several turns, as module:name or file.py:name; sets
    # old_logprobs=recompute instead of generator; empty: none
    environment: str = ""
    environment_workers: Annotated[int, Field(ge=1, le=1024)] = 1  # worker processes for environments on each rank
    # largest difference in nats between a token's logprobs in generation and in training; none: 1e-4 in float32, 2 in
    # bfloat16
    parity_tolerance: NonNegative | None = None
    # number of seconds without activity after which a job counts as hung
    deadline_s: Annotated[float, Field(gt=0, le=10**6)] = 60.0
    # number of prompts whose responses before and after training are printed, chosen from four times as many; 0: none
    num_samples: NonNegativeInt = 3
    wandb: str = ""  # project at Weights & Biases to log to; empty: nothing is logged there
    mlflow: str = ""  # experiment at MLflow to log to; empty: nothing is logged there
    trackio: str = ""  # project of trackio to log to; empty: nothing is logged there
    data: DataOptions = DataOptions()
    generation: Generation = Generation()
    episode: Episode = Episode()
    optimizer: Optimizer = Optimizer()
    experts: Experts = Experts()
    lora: Lora = Lora()
    checkpoint: Checkpointing = Checkpointing()
    eval: Evaluation = Evaluation()
    rollouts: RolloutFiles = RolloutFiles()
    logging: Logging = Logging()
    strategy: dict[str, Any] = field(default_factory=dict)  # options of place(): `strategy.NAME=VALUE`
    # what files() found on disk, by role
    found_files: dict[str, ModelFiles] = field(default_factory=dict, init=False, repr=False, compare=False)

    OPEN, NO_OPTIONS = ("strategy",), ("algorithm", "found_files", "started", "run_folder")

    def group_name(self, field: str) -> str:
        """Returns the name of the group in a field."""
        return self.algorithm.name if field == "options" else field

    def __post_init__(self) -> None:
        page = self.algorithm
        if page.name in {part.name for part in dataclasses.fields(self)}:
            raise UserError(f"algorithm {page.name}: this is an option of every run; give the file another name")
        options = page.options() if self.options is DEFAULTS else self.options
        if self.environment and hasattr(options, OLD):  # bits of the sampler's depend on how fast answers come
            old = getattr(options, OLD).replace("generator", "recompute")
            options = dataclasses.replace(options, **{OLD: old})
        rates: dict[str, Any] = {role: self.optimizer.lr.get(role, page.roles[role].lr) for role in page.trained_roles}
        adapters = {role: self.lora.roles.get(role, RoleLora()) for role in page.trained_roles}
        values = {
            "options": options,
            "models": {role: self.models.get(role, "") for role in page.roles},
            "optimizer": dataclasses.replace(self.optimizer, lr=rates),
            "lora": dataclasses.replace(self.lora, roles=adapters),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def main_role(self) -> str:
        """The first role: its folder has the tokenizer, and `--model` names it."""
        return next(iter(self.algorithm.roles))

    @property
    def main_folder(self) -> str:
        """The folder of the first role's model."""
        return self.files().folder

    @property
    def title(self) -> str:
        """The preset, and the shapes of its models if they differ."""
        return f"{self.preset} ({self.shape})" if "=" in self.shape else self.preset

    @property
    def only_function(self) -> bool:
        """Whether the reward function, or the environment, replaces the reward model."""
        return bool(self.reward_function or self.environment) and self.reward_function_mode == "replace"

    @property
    def rows_per_prompt(self) -> int:
        """The sequences of a prompt in the batch."""
        return self.samples_per_prompt * self.episode.rows

    @property
    def row_tokens(self) -> int:
        """The limit on the length of a response, with what an environment answers."""
        return self.episode.max_row_tokens or self.generation.max_new_tokens

    def files(self, role: str = "") -> ModelFiles:
        """Returns where the parts of a role's model are (default: the first role); nowhere if a reward function
        replaces the role, or if no folder is known."""
        role, roles = role or self.main_role, self.algorithm.roles
        if role not in self.found_files:
            is_replaced = roles[role].judge and self.only_function
            given = "" if is_replaced else folder_of(role, self.models, roles, self.lora.base)
            self.found_files[role] = model_files(given, self.lora.base)
        return self.found_files[role]

    def adapters(self, role: str) -> Adapters | None:
        """Returns the adapters of a role, by its folder or by options; None if it has none. Raises UserError."""
        trains, files = role in self.algorithm.trained_roles, self.files(role)
        if files.adapter:
            adapters, _ = adapters_in(files.adapter, files.folder)
            return of_folder(self.lora, role, adapters, files.adapter) if trains else adapters
        return self.lora.of(role) if trains else None


def split_functions(text: str) -> list[str]:
    """Returns the reward functions that an option names."""
    return [part.strip() for part in text.split(",") if part.strip()]


NO_PROMPTS = f"there are no prompts: give data.prompts=FILE ({KNOWN})"


def prompt_files(config: Config) -> list[str]:
    """Returns the files, folders and patterns that data.prompts names."""
    return named_parts(config.data.prompts)


def function_labels(config: Config) -> list[str]:
    """Returns the names of reward functions whose scores are parts of a sum, in the log: without their modules; none
    for one function that is the score."""
    names = function_names(config)
    return names if len(names) > 1 or config.reward_function_mode == "add" else []


def function_names(config: Config) -> list[str]:
    """Returns the names of the reward functions, without their modules."""
    return [spec.rpartition(":")[2] for spec in split_functions(config.reward_function)]


def overridden(config: Config, overrides: Iterable[str], given: Sequence[Setting] = ()) -> Config:
    """Returns the config with the settings of a file, then with dotted overrides. Raises UserError."""
    words = settings_of(overrides)
    values = {setting.key: str(setting.value) for setting in words}
    if ITERATIONS in values and values.get(EPOCHS, "").strip("0."):
        raise UserError(f"{ITERATIONS} and {EPOCHS} both say how long the run is: give one of them")
    return with_settings(config, [*given, *words], _assigned)


def _assigned(config: Config, setting: Setting) -> Config:
    """Returns a copy with one option set. Raises UserError for an unknown key or a wrong value."""
    key, value = setting.key, setting.value
    group, _, name = key.partition(".")
    text = "none" if value is None else value if isinstance(value, str) else ",".join(value)
    if group == "strategy":
        if not name or "." in name or name == "name":
            raise UserError(
                f"{key}: strategy options are set as strategy.NAME=value; the strategy itself by --strategy"
            )
        return dataclasses.replace(config, strategy={**config.strategy, name: text})
    if key in ("preset", "algorithm"):
        raise UserError(f"{key}={text}: the other options depend on it; choose it by --{key} {text}")
    config = assigned(config, setting)
    return with_value(config, EPOCHS, 0.0) if key == ITERATIONS else config  # the later one of the two counts


def evaluated(config: Config) -> Config:
    """Returns the options of training with those of the evaluation in their place."""
    evaluation, generation = config.eval, config.generation
    max_new_tokens = evaluation.max_new_tokens or generation.max_new_tokens
    # the number of prompts is known before they are tokenised, so none is dropped
    long_prompts = "truncate" if config.data.long_prompts == "drop" else config.data.long_prompts
    shortest = min(generation.min_new_tokens, max_new_tokens)
    data = dataclasses.replace(
        config.data, prompts=evaluation.prompts, weights=(), epochs=0.0, long_prompts=long_prompts
    )
    generation = dataclasses.replace(generation, max_new_tokens=max_new_tokens, min_new_tokens=shortest)
    changes: dict[str, Any] = {"data": data, "generation": generation}
    if function := evaluation.reward_function:
        changes |= {"reward_function": function, "reward_function_mode": "replace", "reward_weights": ()}
    return dataclasses.replace(config, **changes)


def resolved(config: Config, *, algorithm: str | None = None, strategy: str | None = None) -> dict[str, Any]:
    """Returns the config as plain JSON values, options in their groups. algorithm, strategy: how to name them (None:
    the algorithm by its name, the strategy not at all)."""
    tree: dict[str, Any] = {"algorithm": algorithm or config.algorithm.name}
    for key, option in options_of(config).items():
        group, dot, name = key.partition(".")
        (tree.setdefault(group, {}) if dot else tree)[name or group] = option.value
    named = {"name": strategy} if strategy else {}
    values: dict[str, Any] = json.loads(json.dumps(tree | {"strategy": named | config.strategy}))
    return values


def leaves(config: Config) -> dict[str, str]:
    """Returns every option as text by its dotted key, for comparing."""
    values = {"algorithm": config.algorithm.name}
    values |= {key: option.value for key, option in options_of(config).items()}
    values |= {f"strategy.{name}": value for name, value in config.strategy.items()}
    return {key: str(json.loads(json.dumps(value, sort_keys=True))) for key, value in values.items()}


def make_workload(config: Config) -> Workload:
    """Returns the workload that strategies and the compiler see."""
    roles, workflow = config.algorithm.roles, _workflow(config)
    shapes: dict[str, ModelShape | None] = {}
    known = shapes_by_role(config.shape, roles)
    for role in (name for name in roles if name in workflow.models):
        if roles[role].judge and config.only_function:
            shapes[role] = None
            continue
        if known[role] and not config.models[role]:
            shape = SHAPES[known[role]]
        else:
            shape = shape_of_folder(_known_folder(config, role))
        shape = dataclasses.replace(shape, scalar_head=roles[role].head == "scalar")
        if (adapters := config.adapters(role)) and (workflow.train_call(role) or config.files(role).adapter):
            shape = adapted(role, shape, adapters)
        shapes[role] = shape
    mixtures = {call.model for call in workflow.generate_calls if (found := shapes[call.model]) and found.num_experts}
    if mixtures and config.experts.replay:
        workflow = _workflow(config, frozenset(mixtures))
    elif not mixtures and not config.experts.replay:
        raise UserError("experts.replay=false: no mixture of experts generates responses; drop the option")
    counted = frozenset(
        call.name for call in workflow.train_calls if (found := shapes[call.model]) and found.num_experts
    )
    if not (config.experts.balance_coef or config.experts.z_coef) or (mixtures and config.experts.replay):
        counted = frozenset()  # generation has counted them
    elif not counted:
        raise UserError("experts.balance_coef and z_coef: no mixture of experts is trained; drop them")
    adds_adapters = config.lora.generate == "joined"
    generating = [shapes[call.model] for call in workflow.generate_calls]
    if adds_adapters and not any(shape and shape.adapters for shape in generating):
        raise UserError("lora.generate=joined: no model with adapters generates responses; drop the option")
    _refuse_dropout(config, workflow)
    lengths = read_forecast_lengths(config.forecast_lengths, config.row_tokens)
    return Workload(
        workflow=workflow,
        models=shapes,
        **{name: getattr(config, name) for name in SIZES} | {"samples_per_prompt": config.rows_per_prompt},
        episode_rows=config.episode.rows,
        epochs=config.options.epochs,
        max_prompt=config.data.max_prompt,
        max_response=config.row_tokens,
        param_bytes={"float32": 4, "bfloat16": 2}[config.dtype],
        max_kept=config.generation.top_k,
        max_sequences=config.generation.max_sequences,
        forecast_lengths=lengths,
        failed_groups=config.forecast_failed_groups,
        bases=bases(shapes, roles, {role: config.files(role).folder for role in shapes}, same_model),
        adds_adapters=adds_adapters,
        counted=counted,
        answers=_forecast_answers(config, lengths.mean if lengths else config.row_tokens),
        may_chain=not why_all_meet(config),
        sums_each_pass=config.optimizer.sum_each_pass,
        state_sums=config.algorithm.state_sums,
        partial_steps=config.partial_steps if config.partial_steps < config.row_tokens else 0,
    )


def _workflow(config: Config, routes: frozenset[str] = frozenset()) -> Workflow:
    """Returns the workflow without calls whose results are precomputed. routes: see Recorder."""
    how = {"replay": config.generation.top_k > 0, "episodes": bool(config.environment)}
    workflow = config.algorithm.workflow(config.options, **how, routes=routes)
    if not config.data.precompute and not config.data.precomputed_logprobs:
        return workflow
    if not workflow.repeated_calls:
        raise UserError(f"data.precompute: {NOTHING_REPEATED}; drop the option")
    if config.data.precompute and config.data.precomputed_logprobs:
        raise UserError("data.precompute computes what data.precomputed_logprobs reads; drop one of them")
    return workflow.without(workflow.repeated_calls)


def why_all_meet(config: Config) -> str:
    """Returns what all ranks do together after every iteration; empty: nothing."""
    every = {"checkpoint.every": config.checkpoint.every, "rollouts.every": config.rollouts.every}
    every |= {"eval.every": config.eval.every} if config.eval.prompts else {}
    names = [f"{name}=1" for name, number in every.items() if number == 1]
    if config.algorithm.has_state and not config.algorithm.state_sums:
        names.append(f"after_iteration of {config.algorithm.name}, which names no STATE_SUMS")
    names += ["grpo.rounds"] * any(one.rounds > 1 for one in config.algorithm.workflow(config.options).computes)
    return ", ".join(names)


def _refuse_dropout(config: Config, workflow: Workflow) -> None:
    """Raises UserError if a model has dropout where responses are generated."""
    lora = config.lora
    for role in workflow.models if workflow.generate_calls else ():
        if (adapters := config.adapters(role)) and adapters.dropout:
            key = "lora.dropout" if lora.roles[role].dropout is None else f"lora.{role}.dropout"
            raise UserError(
                f"{key}={adapters.dropout:g}: {config.algorithm.name} generates responses, which training would give "
                "other probabilities than generation did; drop the option"
            )


def _forecast_answers(config: Config, length: float) -> Answers | None:
    """Returns how episodes of a length in tokens are forecast to be answered; None without an environment. Raises
    UserError."""
    if not config.environment:
        return None
    drawn = length * config.generation.max_new_tokens / config.row_tokens
    return read_forecast_episodes(config.forecast_episodes, drawn, length)


def _known_folder(config: Config, role: str) -> str:
    """Returns the folder of a role. Raises UserError if none is known."""
    if folder := config.files(role).folder:
        return folder
    if role == config.main_role:
        raise UserError(f"preset {config.preset} has no {role}; pass --model FOLDER")
    if config.shape:
        raise UserError(f"shape={config.shape} gives no shape of {role}; add {role}=SHAPE")
    instead = " or reward_function=module:function" if config.algorithm.roles[role].judge else ""
    raise UserError(f"there is no {role}: give models.{role}=FOLDER{instead}")
