"""Options that contradict each other."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from rlhf_spmd.config.evaluation_metrics import metric_names
from rlhf_spmd.config.options import (
    OLD,
    Config,
    RolloutFiles,
    evaluated,
    function_labels,
    prompt_files,
    split_functions,
)
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.adapters.uniform import has_own_head, other_base
from rlhf_spmd.pages.option_suggestions import did_you_mean
from rlhf_spmd.pages.option_tree import options_of
from rlhf_spmd.pages.option_values import TEMPLATE_KWARGS, check_template_kwargs, text_of
from rlhf_spmd.plan.adapters import ALL_LINEAR, LINEAR_LAYERS
from rlhf_spmd.plan.workflow import Compute, Generate, check_temperature

# options of an evaluation that concern generated responses
GENERATED = ("samples_per_prompt", "temperature", "max_new_tokens", "reward_function", "right_at")
# Of an iteration: optimizer steps that `check` goes through in a minute, and rows whose order a rank can hold.
MOST_STEPS, MOST_SEQUENCES = 10_000, 2**20
MOST_COUNTED_EPOCHS = 1000  # whose steps are cut by a budget of tokens: seconds for small sets
OF_THE_PACKAGE = ("rlhf_spmd.rewards:", "rlhf_spmd.embedded.table_tools:")


class Rule(NamedTuple):
    """What options may not be together. The message names the options and their values before the text.

    keys: of the options, with spaces between them.
    broken: whether the rule is broken, by its truth.
    """

    keys: str
    broken: object
    text: str


def foreign_functions(*texts: str) -> list[str]:
    """Returns the reward functions and environments that options name, without those of the package."""
    specs = dict.fromkeys(spec for text in texts for spec in split_functions(text))
    return [spec for spec in specs if not spec.startswith(OF_THE_PACKAGE)]


def check_options(config: Config) -> None:
    """Raises UserError, which has a line for each contradiction."""
    check_temperature("generation.temperature", config.generation.temperature, or_zero=False)
    check_template_kwargs(TEMPLATE_KWARGS, config.data.chat_template_kwargs)
    rules = [*_of_sizes(config), *_of_data(config), *_of_rewards(config), *_of_evaluation(config)]
    rules += [*_of_episodes(config), *_of_training(config), *_of_lora(config)]
    options, problems = options_of(config), []
    for keys, broken, text in rules:
        if broken:
            given = [f"{key}={text_of(options[key].value)}" for key in keys.split()]
            problems.append(f"{', '.join(given)}: {text}")
    if problems:
        raise UserError("\n".join(problems))
    sizes = {name: getattr(config, name) for name in ("rollout_batch", "samples_per_prompt", "mini_batch")}
    sizes["max_new_tokens"] = config.generation.max_new_tokens
    if problem := config.algorithm.problem(config.options, **sizes):
        raise UserError(f"algorithm {config.algorithm.name}: {problem}")


def _changed(group: str, options: Any) -> list[str]:
    """Returns the keys of a group's options that are not the default ones."""
    usual = type(options)()
    names = [part.name for part in dataclasses.fields(options)]
    return [f"{group}.{name}" for name in names if getattr(options, name) != getattr(usual, name)]


def _of_sizes(config: Config) -> Iterator[Rule]:
    generation, epochs = config.generation, config.options.epochs
    sequences = config.rollout_batch * config.samples_per_prompt
    is_whole = type(epochs) is int and epochs > 0  # a page may have it of any type
    num_steps = sequences // config.mini_batch * (epochs if is_whole else 1)
    sizes = "rollout_batch samples_per_prompt mini_batch"
    yield Rule(
        sizes,
        sequences % config.mini_batch,
        f"{sequences} sequences are not a multiple of mini_batch; change one of them",
    )
    yield Rule(
        "generation.top_k",
        (generation.top_p < 1 or generation.min_p > 0) and not generation.top_k,
        "generation.top_p and generation.min_p need it, which bounds the sets that are stored; e.g. "
        "generation.top_k=200",
    )
    yield Rule(
        "generation.min_new_tokens generation.max_new_tokens",
        generation.min_new_tokens > generation.max_new_tokens,
        "the first is larger than the second; lower it",
    )
    key = f"{config.algorithm.name}.epochs"
    yield Rule(key, not is_whole, "give a whole number of at least 1")
    yield Rule(
        f"{sizes} {key}",
        num_steps > MOST_STEPS or sequences > MOST_SEQUENCES,
        f"{sequences:,} sequences and {num_steps:,} optimizer steps are too many for one iteration, of at most "
        f"{MOST_SEQUENCES:,} and {MOST_STEPS:,}; lower rollout_batch (and raise iterations) or samples_per_prompt, or "
        "raise mini_batch",
    )
    yield Rule(
        "rollouts.format",
        config.rollouts.format != RolloutFiles().format and not config.rollouts.every,
        "no samples are written; give rollouts.every=1, or drop the option",
    )


def _of_data(config: Config) -> Iterator[Rule]:
    data, files, epochs = config.data, prompt_files(config), f"{config.algorithm.name}.epochs"
    yield Rule(
        "data.weights data.prompts",
        data.weights and len(data.weights) != len(files),
        f"{len(data.weights)} weights for {len(files)} files of prompts; give one for each",
    )
    yield Rule(
        "data.epochs data.weights",
        data.weights and data.epochs,
        "each file has epochs of its own; give iterations, or drop data.weights",
    )
    if not config.mini_batch_tokens:
        return
    roles, calls = config.algorithm.roles, config.algorithm.workflow(config.options).calls
    yield Rule(
        "mini_batch_tokens",
        any(isinstance(call, Generate | Compute) or roles[call.model].judge for call in calls),
        f"{config.algorithm.name} computes data of rows before it trains on them; the limit is for algorithms that "
        "only learn from responses of the data set (sft, reward_model, dpo); drop the option",
    )
    yield Rule(
        f"mini_batch_tokens {epochs}",
        config.options.epochs != 1,
        f"a later pass over the rows of an iteration mixes its steps; leave {epochs} at 1, and give data.epochs",
    )
    yield Rule(
        "mini_batch_tokens data.epochs",
        data.epochs > MOST_COUNTED_EPOCHS,
        f"the steps of each epoch are counted, of at most {MOST_COUNTED_EPOCHS:,} epochs; give iterations instead",
    )
    yield Rule(
        "mini_batch_tokens data.weights",
        data.weights,
        "rows of files with weights are not cut into steps of so many tokens; drop one",
    )


def _of_training(config: Config) -> Iterator[Rule]:
    optimizer = config.optimizer
    yield Rule(
        "optimizer.warmup_steps optimizer.warmup_ratio",
        optimizer.warmup_steps and optimizer.warmup_ratio,
        "both say how long the warm-up is: give one of them",
    )
    yield Rule(
        "optimizer.min_lr_ratio optimizer.schedule",
        optimizer.min_lr_ratio and optimizer.schedule == "constant",
        "a constant schedule ends at the learning rate itself; give optimizer.schedule=cosine or linear, or drop "
        "optimizer.min_lr_ratio",
    )
    for name in ("entity", "group", "tags"):
        is_given = getattr(config.logging, name) and not config.wandb
        yield Rule(f"logging.{name}", is_given, "it is for Weights & Biases; give wandb=PROJECT, or drop the option")


def _of_rewards(config: Config) -> Iterator[Rule]:
    functions, labels = split_functions(config.reward_function), function_labels(config)
    yield Rule("reward_function", len(set(labels)) < len(labels), "two functions have one name in the log; rename one")
    yield Rule(
        "reward_weights reward_function",
        config.reward_weights and len(config.reward_weights) != len(functions),
        f"{len(config.reward_weights)} weights for {len(functions)} reward functions; give one for each",
    )
    yield Rule(
        "reward_timeout_s",
        config.reward_timeout_s and not config.reward_workers,
        "it needs processes that can be ended; set reward_workers=2, or drop the option",
    )
    yield Rule(
        "reward_workers", config.reward_workers and not functions, "there is no reward_function; give one, or drop this"
    )


def _of_episodes(config: Config) -> Iterator[Rule]:
    name, algorithm, options = config.algorithm.name, config.algorithm, config.options
    if not config.environment:
        keys = _changed("episode", config.episode)
        keys += [f"{name}.turn_rewards"] if getattr(options, "turn_rewards", False) else []
        keys += ["forecast_episodes"] if config.forecast_episodes else []
        for key in keys:
            text = "it is for responses that an environment answers; give environment=FILE.py:NAME, or drop the option"
            yield Rule(key, True, text)
        return
    yield Rule(
        "episode.max_row_tokens generation.max_new_tokens",
        0 < config.episode.max_row_tokens < config.generation.max_new_tokens,
        "the first limits the drawn tokens too: raise it, or lower the second",
    )
    yield Rule(
        "environment",
        not algorithm.workflow(options).generate_calls,
        f"algorithm {name} generates no responses; drop the option",
    )
    yield Rule(
        "environment",
        not hasattr(options, OLD),
        f"it needs {name}.{OLD}=recompute, and algorithm {name} has no such option; derive its Options from "
        "off_policy.Options",
    )
    yield Rule(
        f"environment {name}.{OLD}",
        getattr(options, OLD, "") == "loglinear",
        "loglinear reads the sampler's logprobs, whose last bits depend on how fast answers come; choose current",
    )
    yield Rule(
        f"environment {name}.overlong",
        getattr(options, "overlong", "") == "shape",
        "shape measures the length of a response of one turn; choose keep or mask",
    )


def _of_lora(config: Config) -> Iterator[Rule]:
    lora, roles, layers = config.lora, config.algorithm.roles, (ALL_LINEAR, *LINEAR_LAYERS)
    every = {"lora.targets": lora.targets}
    every |= {f"lora.{role}.targets": own.targets for role, own in lora.roles.items() if own.targets is not None}
    for key, targets in every.items():
        unknown = [layer for layer in targets if layer not in layers]
        hint = did_you_mean(unknown[0], layers) if unknown else ""
        text = f"no layer that can have adapters is called {', '.join(unknown)}{hint}; choose from {', '.join(layers)}"
        yield Rule(key, unknown, text)
        yield Rule(key, not targets, "it is empty: name a layer, or drop the option")
    yield from _without_adapters(config)
    yield Rule(
        "lora.base",
        lora.base and not any(config.files(role).adapter for role in roles),
        "no model is given as the folder of an adapter; drop the option",
    )
    for role, about in roles.items():
        files = config.files(role)
        yield Rule(
            f"models.{role}",
            config.models[role] and about.head == "lm" and has_own_head(files),
            f"this is the adapter of a critic or reward model (SEQ_CLS), and the {role} is a language model; give an "
            "adapter of one (CAUSAL_LM)",
        )
        base = other_base(files.adapter, lora.base) if lora.base and files.adapter else ""
        yield Rule(
            "lora.base",
            base,
            f"the {role} goes on from the adapter in {files.adapter}, which was made for {base}, whose weights are not "
            f"those of lora.base; drop it, or write {lora.base} as base_model_name_or_path into "
            f"{files.adapter}/adapter_config.json if its weights are stored in other files there",
        )


def _without_adapters(config: Config) -> Iterator[Rule]:
    """Yields a rule for each option of adapters where no model has any."""
    lora, usual = config.lora, type(config.lora)()
    names = ("alpha", "targets", "rslora", "dropout")
    if not any(map(config.adapters, config.algorithm.roles)):
        for name in names:
            is_given = getattr(lora, name) != getattr(usual, name)
            yield Rule(f"lora.{name}", is_given, "no model has adapters; give lora.rank=16, or drop the option")
    for role, own in lora.roles.items():
        text = f"the {role} has no adapters; give lora.{role}.rank=16, or drop the option"
        for name in names:
            is_given = getattr(own, name) is not None
            yield Rule(f"lora.{role}.{name}", is_given and config.adapters(role) is None, text)


def _of_evaluation(config: Config) -> Iterator[Rule]:
    evaluation, best = config.eval, config.checkpoint.best
    changed = _changed("eval", evaluation)
    if not evaluation.prompts:
        for key in (*changed, *(["checkpoint.best"] if best else [])):
            yield Rule(key, True, "there is no evaluation without prompts; give eval.prompts=FILE, or drop the option")
        return
    check_temperature("eval.temperature", evaluation.temperature)
    workflow = config.algorithm.workflow(config.options)
    for key in (f"eval.{name}" for name in GENERATED):
        generates_none = key in changed and not workflow.generate_calls
        text = f"algorithm {config.algorithm.name} generates no responses; drop the option"
        yield Rule(key, generates_none, text)
    names = [*config.algorithm.metrics]
    if workflow.generate_calls:
        names = metric_names(evaluation.samples_per_prompt, function_labels(evaluated(config)))
    first = next(iter(names), "NAME")
    yield Rule(
        "checkpoint.best",
        best and best not in names and not best.startswith(tuple(f"{name}/" for name in names)),
        f"the metrics of this evaluation are {', '.join(names)}, also of one data source, as in {first}/gsm8k; choose "
        "one of them",
    )
    yield Rule(
        "eval.patience",
        evaluation.patience and not best,
        f"say which metric has to become better, e.g. checkpoint.best={first}",
    )
    yield Rule(
        "eval.samples_per_prompt",
        evaluation.samples_per_prompt > 1 and not evaluation.temperature,
        "greedy responses to a prompt are all the same; give eval.temperature=1, or one sample",
    )
