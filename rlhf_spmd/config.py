"""What a run is: frozen dataclasses, presets as functions, dotted overrides (`ppo.kl_coef=0.02`); no unknown keys.

Imports neither torch nor MPI, so that `check` starts at once.
"""

import dataclasses
import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, PydanticUserError, TypeAdapter, ValidationError

from rlhf_spmd import embedded
from rlhf_spmd.algorithms.ppo import PPO, Fraction01, NonNegative, workflow
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.config import read_config_json
from rlhf_spmd.option_names import did_you_mean, suggest_option
from rlhf_spmd.plan.workload import ModelShape, Workload

MOST_TOKENS = 1024  # of prompts, and of responses, where nothing else is said
DeviceChoice = Literal["auto", "cpu", "cuda", "shared"]
BelowOne = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, slots=True)
class Models:
    """Checkpoint folders."""

    actor: str = ""  # the model that is trained; `--model` sets it
    critic: str = ""  # empty: the reward model if it has the actor's tokenizer, else the actor with a head of zeros
    reference: str = ""  # empty: the actor as it is at the start of the run
    reward: str = ""  # the reward model; may stay empty if reward_function replaces it


@dataclass(frozen=True, slots=True)
class Data:
    prompts: str = ""  # file of prompts: .jsonl, .parquet or .txt
    key: str = "prompt"  # field (.jsonl) or column (.parquet) that holds the prompt
    max_prompt: PositiveInt = 128  # most tokens of a prompt
    long_prompts: Literal["error", "truncate", "drop"] = "error"  # what to do with one; truncate keeps its last tokens


@dataclass(frozen=True, slots=True)
class Generation:
    max_new_tokens: PositiveInt = 128  # most tokens of a response
    min_new_tokens: NonNegativeInt = 0  # no end of sequence is drawn before this many tokens
    temperature: PositiveFloat = 1.0  # logits are divided by it, in generation and in every later pass
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

    actor_lr: PositiveFloat = 1e-6  # learning rate of the actor
    critic_lr: PositiveFloat = 5e-6  # learning rate of the critic
    warmup_steps: NonNegativeInt = 0  # optimizer steps in which the learning rate rises from zero
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # learning rate after the warm-up
    beta1: BelowOne = 0.9  # decay of AdamW's first moment
    beta2: BelowOne = 0.95  # decay of AdamW's second moment
    eps: PositiveFloat = 1e-5  # added to the denominator of AdamW
    weight_decay: NonNegative = 0.0  # weight decay of AdamW
    max_grad_norm: PositiveFloat = 1.0  # gradients are clipped to this global norm


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """A checkpoint is also written at the end of the run and on SIGUSR1 and SIGTERM."""

    every: NonNegativeInt = 10  # iterations between two checkpoints; 0: none while the run goes on
    keep: PositiveInt = 2  # number of newest checkpoints to keep


@dataclass(frozen=True, slots=True)
class Config:
    """One run. Batch sizes are global but for micro_batch (sequences per forward on one data-parallel shard)."""

    preset: str  # name of the preset; set by `--preset` only
    models: Models = Models()
    shape: str = ""  # model shape of a preset without weights, for check and plan
    device: DeviceChoice = "auto"  # where ranks compute; shared: ranks share GPUs through host memory
    device_type: str = "cpu"  # device type for forecasts of bytes and seconds, e.g. a100-80g
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0  # seed of the order of prompts, of tokens and of permutations
    iterations: PositiveInt = 10  # number of iterations: generate, score, train
    dtype: Literal["float32", "bfloat16"] = "float32"  # precision while computing; master weights are float32
    rollout_batch: PositiveInt = 128  # prompts per iteration, over all ranks
    samples_per_prompt: PositiveInt = 1  # responses to each prompt
    mini_batch: PositiveInt = 32  # sequences per optimizer step, over all ranks
    micro_batch: PositiveInt = 32  # sequences per forward on one data-parallel shard
    reward_function: str = ""  # a Python function: module:function or file.py:function
    reward_function_mode: Literal["replace", "add"] = "replace"  # replace the reward model, or add to its score
    parity_tolerance: NonNegative | None = None  # most nats for one token; none: 1e-4 in float32, 2 in bfloat16
    deadline_s: Annotated[float, Field(gt=0, le=10**6)] = 60.0  # seconds of inactivity after which a job counts as hung
    num_samples: NonNegativeInt = 3  # prompts whose responses are shown before and after training
    wandb: str = ""  # project at Weights & Biases; empty: off
    data: Data = Data()
    generation: Generation = Generation()
    ppo: PPO = PPO()
    optimizer: Optimizer = Optimizer()
    checkpoint: Checkpointing = Checkpointing()
    strategy: dict[str, Any] = field(default_factory=dict)  # options of place(): `strategy.NAME=VALUE`


def tiny() -> Config:
    """The embedded default: a model of about a million parameters, its reward model and prompts, all in the package."""
    return Config(
        preset="tiny",
        models=Models(actor=str(embedded.path_of("actor")), reward=str(embedded.path_of("reward"))),
        iterations=15,
        rollout_batch=128,
        mini_batch=32,
        micro_batch=32,
        data=Data(prompts=str(embedded.path_of("prompts.jsonl")), max_prompt=32),
        generation=Generation(max_new_tokens=24),
        ppo=PPO(epochs=2, kl_coef=0.05),
        optimizer=Optimizer(actor_lr=3e-4, critic_lr=1.5e-4),
    )


def smollm2() -> Config:
    """SmolLM2-135M with a sentiment reward function, in bfloat16 on a CPU; the folder comes with --model."""
    return Config(
        preset="smollm2",
        iterations=3,
        dtype="bfloat16",
        rollout_batch=16,
        mini_batch=8,
        micro_batch=4,
        reward_function="rlhf_spmd.rewards:vader_positive",
        data=Data(prompts=str(embedded.path_of("sentiment_prompts.txt")), max_prompt=32),
        generation=Generation(max_new_tokens=24),
        ppo=PPO(epochs=1, kl_coef=0.05, truncation="score"),
        optimizer=Optimizer(actor_lr=1e-5, critic_lr=1e-4),
    )


def for_model(folder: str | None = None, *, on_gpu: bool = False) -> Config:
    """Any checkpoint folder, with what suits a real model: learning rates of the literature (Optimizer), the precision
    of the device, prompts and responses as long as its context allows, and no reward or prompts but the user's."""
    context = read_config_json(Path(folder) / "config.json").max_position_embeddings if folder else 2 * MOST_TOKENS
    longest = min(context // 2, MOST_TOKENS)
    return Config(
        preset="model",
        dtype="bfloat16" if on_gpu else "float32",
        deadline_s=300.0,
        rollout_batch=128,
        mini_batch=32,
        micro_batch=4,
        data=Data(max_prompt=longest),
        generation=Generation(max_new_tokens=longest),
        ppo=PPO(epochs=1),
    )


# Llama 1 and 2 (arXiv 2302.13971, 2307.09288): layers, hidden, intermediate, heads, kv heads.
_LLAMA = {
    "llama-7b": (32, 4096, 11008, 32, 32),
    "llama-13b": (40, 5120, 13824, 40, 40),
    "llama-33b": (60, 6656, 17920, 52, 52),
    "llama-65b": (80, 8192, 22016, 64, 64),
    "llama-70b": (80, 8192, 28672, 64, 8),
}


def _llama(name: str) -> Config:
    """Four models of one Llama shape, without weights: for check, plan and bench."""
    return Config(
        preset=name,
        shape=name,
        device_type="a100-80g",
        dtype="bfloat16",
        rollout_batch=512,
        mini_batch=128,
        micro_batch=8,
        data=Data(max_prompt=256),
        generation=Generation(max_new_tokens=256),
        ppo=PPO(epochs=1),
    )


PRESETS = {"tiny": tiny, "model": for_model, "smollm2": smollm2}
PRESETS |= {name: (lambda name=name: _llama(name)) for name in _LLAMA}


def load(
    preset: str | None, overrides: Iterable[str] = (), model: str | None = None, *, on_gpu: bool = False
) -> Config:
    """The resolved config of a preset (None: tiny, or that for any model if there is one), a checkpoint folder for the
    actor (and reference), and dotted overrides. on_gpu: whether it is for GPUs."""
    if model == "":
        raise UserError("--model is empty: give a folder (a variable that is not set?)")
    preset = preset or ("model" if model else "tiny")
    if preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}{did_you_mean(preset, PRESETS)}; known: {', '.join(PRESETS)}")
    before = for_model(model, on_gpu=on_gpu) if preset == "model" else PRESETS[preset]()
    config = before
    if model:
        models = dataclasses.replace(config.models, actor=model, reference="", critic="")
        config = dataclasses.replace(config, models=models)
    config = overridden(config, overrides)
    if config.models.actor:  # a checkpoint counts more than the preset's shape
        if config.shape != before.shape:
            raise UserError(f"shape={config.shape}: {config.models.actor} has a shape of its own; drop one of the two")
        config = dataclasses.replace(config, shape="")
    check_sizes(config)
    return config


def overridden(config: Config, overrides: Iterable[str]) -> Config:
    """With dotted overrides, not yet checked against each other."""
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise UserError(
                f"override {override!r} is not of the form key=value, e.g. iterations=3 or ppo.kl_coef=0.02"
            )
        config = _override(config, key.split("."), text, key)
    return config


def _override(config: Any, path: list[str], text: str, full: str) -> Any:
    """A copy of a (nested) dataclass with one leaf set from text."""
    name, *rest = path
    hints = get_type_hints(type(config), include_extras=True)
    if name not in hints:
        keys = [f"{full[: len(full) - len('.'.join(path))]}{known}" for known in hints]
        hint = suggest_option(full, keys, all_keys())
        raise UserError(f"unknown config key {full!r}{hint}; known here: {', '.join(keys)}")
    if full == "preset":
        raise UserError(f"{full}={text}: the preset is what the overrides change; choose it by --preset {text}")
    value = getattr(config, name)
    if name == "strategy":
        if len(rest) != 1:
            raise UserError(
                f"{full}: strategy options are set as strategy.NAME=value; the strategy itself by --strategy"
            )
        return dataclasses.replace(config, strategy={**value, rest[0]: text})
    if dataclasses.is_dataclass(value):
        if not rest:
            keys = ", ".join(f"{full}.{f.name}" for f in dataclasses.fields(value))
            raise UserError(f"{full!r} is a group of options; set one of {keys}")
        return dataclasses.replace(config, **{name: _override(value, rest, text, full)})
    if rest:
        raise UserError(f"unknown config key {full!r}: {name} has no parts; set {name}=value")
    return dataclasses.replace(config, **{name: parse_value(hints[name], text, full)})


def all_keys() -> list[str]:
    """Every key that an override may set."""
    keys = []
    for part in dataclasses.fields(Config):
        inner = dataclasses.fields(part.type) if dataclasses.is_dataclass(part.type) else ()
        keys += [f"{part.name}.{leaf.name}" for leaf in inner] or [part.name]
    return keys


def parse_value(annotation: Any, text: Any, key: str) -> Any:
    """Text to the annotated type: as it stands, else read as JSON ("none" is null), else as a list with commas.

    Raises UserError naming key and value; infinity and NaN are no numbers here.
    """
    try:
        adapter = TypeAdapter(annotation)
    except PydanticUserError as error:
        raise UserError(f"{key} cannot be set from text, because its type is {annotation}") from error
    candidates: list[Any] = [text]
    if isinstance(text, str):
        with suppress(ValueError, RecursionError):
            candidates.append(json.loads("null" if text.lower() == "none" else text))
        candidates.append([part.strip() for part in text.split(",")] if text else [])
    problem = None
    for candidate in candidates:
        try:
            value = adapter.validate_python(candidate)
        except ValidationError as error:
            problem = problem or error
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key}={text}: Input should be a finite number")
        return value
    detail = "; ".join(dict.fromkeys(item["msg"] for item in problem.errors()))
    raise UserError(f"{key}={text}: {detail}")


def check_sizes(config: Config) -> None:
    """Raises UserError where options do not go together."""
    sequences = config.rollout_batch * config.samples_per_prompt
    if sequences % config.mini_batch:
        raise UserError(
            f"rollout_batch {config.rollout_batch} x samples_per_prompt {config.samples_per_prompt} = {sequences} "
            f"sequences are not a multiple of mini_batch {config.mini_batch}; change one of them"
        )
    generation = config.generation
    if (generation.top_p < 1 or generation.min_p > 0) and not generation.top_k:
        raise UserError(
            "generation.top_p and generation.min_p need generation.top_k, which bounds the sets that are stored; "
            "e.g. generation.top_k=200"
        )
    least, most = config.generation.min_new_tokens, config.generation.max_new_tokens
    if least > most:
        raise UserError(f"generation.min_new_tokens={least} is larger than generation.max_new_tokens={most}")
    if config.shape and config.shape not in _LLAMA:
        hint = did_you_mean(config.shape, _LLAMA)
        raise UserError(f"unknown shape {config.shape!r}{hint}; known: {', '.join(_LLAMA)}")


def resolved(config: Config) -> dict[str, Any]:
    """The config as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def leaves(config: Config) -> dict[str, str]:
    """Every option as text by its dotted key, for comparing."""
    found = {}
    for name, value in resolved(config).items():
        inner = {f"{name}.{key}": leaf for key, leaf in value.items()} if isinstance(value, dict) else {name: value}
        found |= {key: str(leaf) for key, leaf in inner.items()}
    return found


def shape_of_folder(folder: str) -> ModelShape:
    """Sizes from a Hugging Face config.json (model/hf.py reads the rest). Raises UserError if that cannot be read."""
    config = read_config_json(Path(folder) / "config.json")
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        tied=config.tie_embeddings,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_output_bias,
        mlp_bias=config.mlp_bias,
        qk_norm=config.qk_norm,
    )


def make_workload(config: Config) -> Workload:
    """The workload that strategies and the compiler see."""
    scalar = {"scalar_head": True}
    if config.shape:
        layers, hidden, intermediate, heads, kv_heads = _LLAMA[config.shape]
        base = ModelShape(layers, hidden, intermediate, heads, kv_heads, hidden // heads, 32000)
        shapes = {"actor": base, "critic": base, "reference": base, "reward": base}
    else:
        if not config.models.actor:
            raise UserError(f"preset {config.preset} has no actor; pass --model FOLDER")
        actor = shape_of_folder(config.models.actor)
        reference = shape_of_folder(config.models.reference) if config.models.reference else actor
        needs_model = not config.reward_function or config.reward_function_mode == "add"
        if needs_model and not config.models.reward:
            raise UserError("there is no reward: give models.reward=FOLDER or reward_function=module:function")
        reward = shape_of_folder(config.models.reward) if needs_model else None
        critic = shape_of_folder(critic_folder(config))
        shapes = {"actor": actor, "critic": critic, "reference": reference, "reward": reward}
    for name in ("critic", "reward"):
        if shapes[name]:
            shapes[name] = dataclasses.replace(shapes[name], **scalar)
    return Workload(
        workflow=workflow(config.ppo, replay=config.generation.top_k > 0),
        models=shapes,
        rollout_batch=config.rollout_batch,
        samples_per_prompt=config.samples_per_prompt,
        mini_batch=config.mini_batch,
        micro_batch=config.micro_batch,
        epochs=config.ppo.epochs,
        max_prompt=config.data.max_prompt,
        max_response=config.generation.max_new_tokens,
        param_bytes={"float32": 4, "bfloat16": 2}[config.dtype],
        whiten=config.ppo.whiten,
        max_kept=config.generation.top_k,
        max_sequences=config.generation.max_sequences,
    )


def critic_folder(config: Config) -> str:
    """Where the critic starts from; see Models."""
    models = config.models
    if models.critic:
        return models.critic
    return models.reward if models.reward and same_tokenizer(models.reward, models.actor) else models.actor


def same_tokenizer(one: str, other: str) -> bool:
    """Whether two folders hold the same tokenizer.json."""
    files = [Path(folder) / "tokenizer.json" for folder in (one, other)]
    return one == other or (all(f.is_file() for f in files) and files[0].read_bytes() == files[1].read_bytes())
