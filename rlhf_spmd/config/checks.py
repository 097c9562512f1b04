"""Options that contradict each other."""

import dataclasses
from collections.abc import Iterator

from rlhf_spmd.config.evaluation_metrics import metric_names
from rlhf_spmd.config.options import OLD, Config, evaluated, function_labels, prompt_files, split_functions
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.adapters.uniform import has_own_head, other_base
from rlhf_spmd.pages.option_tree import options_of
from rlhf_spmd.pages.option_values import TEMPLATE_KWARGS, check_template_kwargs, text_of
from rlhf_spmd.plan.adapters import ALL_LINEAR, LINEAR_LAYERS
from rlhf_spmd.plan.calls import Compute, Generate, check_temperature

MOST_SEQUENCES, MOST_STEPS = 2**20, 10_000  # of an iteration: `check` goes through all of its steps
MOST_COUNTED_EPOCHS = 1000  # whose steps are cut by a budget of tokens: seconds for small sets
OF_THE_PACKAGE = ("rlhf_spmd.rewards:", "rlhf_spmd.embedded.table_tools:")
ADAPTERS = ("lora.alpha", "lora.targets", "lora.rslora", "lora.dropout")
TRACKER = ("logging.entity", "logging.group", "logging.tags")
# options of sampling: where responses are given, they would repeat rows or change logprobs
OF_SAMPLING = ("samples_per_prompt", "generation.temperature", "generation.min_new_tokens")
# options of an evaluation that concern generated responses
GENERATED = ("samples_per_prompt", "temperature", "max_new_tokens", "reward_function", "right_at")
# Options that may not be together, whether they break that rule (by its truth), and what to do. The message names the
# options and their values before the text.
Rule = tuple[str, object, str]


def foreign_functions(*texts: str) -> list[str]:
    """Returns the reward functions and environments that options name, without those of the package."""
    specs = dict.fromkeys(spec for text in texts for spec in split_functions(text))
    return [spec for spec in specs if not spec.startswith(OF_THE_PACKAGE)]


def check_options(config: Config) -> None:
    """Raises UserError, which has a line for each contradiction."""
    check_temperature("generation.temperature", config.generation.temperature, or_zero=False)
    check_temperature("eval.temperature", config.eval.temperature)
    check_template_kwargs(TEMPLATE_KWARGS, config.data.chat_template_kwargs)
    options, problems = options_of(config), []
    rules = (_of_training, _of_data, _of_rewards, _of_environments, _of_adapters, _without_effect)
    for keys, broken, text in (rule for rules_of in rules for rule in rules_of(config)):
        if broken:
            given = [f"{key}={text_of(options[key].value)}" for key in keys.split()]
            problems.append(f"{', '.join(given)}: {text}")
    if problems:
        raise UserError("\n".join(problems))
    sizes = {name: getattr(config, name) for name in ("rollout_batch", "samples_per_prompt", "mini_batch")}
    sizes["max_new_tokens"] = config.generation.max_new_tokens
    if problem := config.algorithm.problem(config.options, **sizes):
        raise UserError(f"algorithm {config.algorithm.name}: {problem}")


def _without_effect(config: Config) -> Iterator[Rule]:
    """Yields a rule for each option that is given where what it is for is not there."""
    evaluates, environment = config.eval.prompts, f"{config.algorithm.name}.turn_rewards"
    generates = config.algorithm.workflow(config.options).generate_calls
    adapters = any(map(config.adapters, config.algorithm.roles))
    folders = any(config.files(role).adapter for role in config.algorithm.roles)
    needs: list[
        tuple[tuple[str, ...], object, str]
    ] = [  # beginnings of keys, whether they have an effect, what they need
        (("episode.", "forecast_episodes", environment), config.environment, "environment=FILE.py:NAME"),
        (("eval.", "checkpoint.best"), evaluates, "eval.prompts=FILE"),
        (tuple(f"eval.{name}" for name in GENERATED), generates or not evaluates, "an algorithm that generates"),
        (OF_SAMPLING, generates, "an algorithm that generates"),
        (("eval.patience",), config.checkpoint.best or not evaluates, "checkpoint.best=METRIC"),
        (TRACKER[:1], config.wandb, "wandb=PROJECT"),
        (
            TRACKER[1:],
            config.wandb or config.mlflow or config.trackio,
            "wandb=PROJECT, mlflow=EXPERIMENT or trackio=PROJECT",
        ),
        (("rollouts.format",), config.rollouts.every, "rollouts.every=1"),
        (("optimizer.min_lr_ratio",), config.optimizer.schedule != "constant", "optimizer.schedule=cosine"),
        (ADAPTERS, adapters, "lora.rank=16"),
        (("lora.base",), folders, "the folder of an adapter as a model"),
        (("reward_workers", "reward_weights"), config.reward_function, "reward_function=FILE.py:NAME"),
        (("reward_timeout_s",), config.reward_workers, "reward_workers=2, processes that can be ended"),
    ]
    for role in config.lora.roles:
        keys = tuple(f"lora.{role}.{name.removeprefix('lora.')}" for name in ADAPTERS)
        needs.append((keys, config.adapters(role), f"lora.{role}.rank=16"))
    for key, option in options_of(config).items():
        usual = {part.name: part.default for part in dataclasses.fields(option.owner)}
        for starts, has_effect, needed in needs:
            if key.startswith(starts) and option.value != usual[option.field]:
                yield key, not has_effect, f"it has no effect without {needed}; give that, or drop the option"


def _of_training(config: Config) -> list[Rule]:
    generation, optimizer = config.generation, config.optimizer
    batch, limits = "rollout_batch samples_per_prompt mini_batch", "generation.min_new_tokens generation.max_new_tokens"
    batch += " episode.rows" if config.episode.rows > 1 else ""
    sequences = config.rollout_batch * config.rows_per_prompt
    num_steps = sequences // config.mini_batch * int(config.options.epochs)
    restricts = (generation.top_p < 1 or generation.min_p > 0) and not generation.top_k
    return [
        (
            batch,
            sequences % config.mini_batch,
            f"{sequences} sequences are not a multiple of mini_batch; change one of them",
        ),
        (
            f"{batch} {config.algorithm.name}.epochs",
            sequences > MOST_SEQUENCES or num_steps > MOST_STEPS,
            f"an iteration has at most {MOST_SEQUENCES:,} sequences and {MOST_STEPS:,} optimizer steps; lower one of "
            "them",
        ),
        (
            "generation.top_k",
            restricts,
            "top_p and min_p need it, which bounds the sets that are stored; e.g. generation.top_k=200",
        ),
        (
            limits,
            generation.min_new_tokens > generation.max_new_tokens,
            "the first is larger than the second; lower it",
        ),
        (
            "optimizer.warmup_steps optimizer.warmup_ratio",
            optimizer.warmup_steps and optimizer.warmup_ratio,
            "both say how long the warm-up is: give one of them",
        ),
    ]


def _of_data(config: Config) -> list[Rule]:
    data, tokens, epochs = config.data, config.mini_batch_tokens, f"{config.algorithm.name}.epochs"
    workflow, roles = config.algorithm.workflow(config.options), config.algorithm.roles
    computes = any(isinstance(call, Generate | Compute) or roles[call.model].judge for call in workflow.calls)
    return [
        (
            "data.weights data.prompts",
            data.weights and len(data.weights) != len(prompt_files(config)),
            "give one weight for each file of prompts",
        ),
        (
            "data.epochs data.weights",
            data.weights and data.epochs,
            "each file has epochs of its own; give iterations, or drop data.weights",
        ),
        (
            "mini_batch_tokens",
            tokens and computes,
            "it is for algorithms that only learn from responses of the data set (sft, reward_model, dpo); drop the "
            "option",
        ),
        (
            f"mini_batch_tokens {epochs}",
            tokens and config.options.epochs != 1,
            "a later pass mixes the steps; give data.epochs in place of it",
        ),
        (
            "mini_batch_tokens data.epochs",
            tokens and data.epochs > MOST_COUNTED_EPOCHS,
            f"the steps of each epoch are counted, of at most {MOST_COUNTED_EPOCHS:,} epochs; give iterations instead",
        ),
        (
            "mini_batch_tokens data.weights",
            tokens and data.weights,
            "rows of files with weights are not cut into steps of so many tokens; drop one",
        ),
    ]


def _of_rewards(config: Config) -> list[Rule]:
    algorithm, evaluation, labels = config.algorithm, config.eval, function_labels(config)
    names, best = [*algorithm.metrics], config.checkpoint.best
    if algorithm.workflow(config.options).generate_calls:
        names = metric_names(evaluation.samples_per_prompt, function_labels(evaluated(config)))
    is_known = best in names or best.startswith(tuple(f"{name}/" for name in names))
    return [
        (
            "reward_function",
            len(set(labels)) < len(labels),
            "two functions have one name in the log; rename one",
        ),
        (
            "reward_weights reward_function",
            config.reward_weights and len(config.reward_weights) != len(split_functions(config.reward_function)),
            "give one weight for each reward function",
        ),
        (
            "checkpoint.best",
            best and evaluation.prompts and not is_known,
            f"choose a metric of this evaluation: {', '.join(names)}, also of one data source, as in NAME/gsm8k",
        ),
        (
            "eval.samples_per_prompt",
            evaluation.prompts and evaluation.samples_per_prompt > 1 and not evaluation.temperature,
            "greedy responses to a prompt are all the same; give eval.temperature=1, or one sample",
        ),
    ]


def _of_environments(config: Config) -> list[Rule]:
    algorithm, options, rows = config.algorithm, config.options, config.episode.rows
    if not config.environment:
        return []
    computes = algorithm.workflow(options).computes
    others = ", ".join(call.function for call in computes if call.scope != "group") or "no function of groups"
    by_rows = getattr(options, "overlong", "keep") != "keep" or any(call.scope != "group" for call in computes)
    return [
        (
            "episode.rows reward_function",
            rows > 1 and (config.reward_function or not config.only_function),
            "the reward of an episode, which its agent returns, is that of all of its rows; drop the reward function",
        ),
        (
            "episode.rows",
            rows > 1 and (by_rows or not computes),
            f"algorithm {algorithm.name} with these options does not compare whole episodes ({others}); choose grpo or "
            "rloo, without turn_rewards, oversampling and overlong",
        ),
        (
            "episode.rows mini_batch",
            config.mini_batch % rows,
            "a mini-batch must hold whole episodes; make mini_batch a multiple of episode.rows",
        ),
        (
            "episode.max_row_tokens generation.max_new_tokens",
            0 < config.episode.max_row_tokens < config.generation.max_new_tokens,
            "the first limits the sampled tokens too: raise it, or lower the second",
        ),
        (
            "environment",
            not algorithm.workflow(options).generate_calls,
            "the algorithm generates no responses; drop the option",
        ),
        (
            "environment",
            not hasattr(options, OLD),
            "the algorithm has no option old_logprobs; derive its Options from off_policy.Options",
        ),
        (
            f"environment {algorithm.name}.{OLD}",
            getattr(options, OLD, "") == "loglinear",
            "loglinear reads the sampler's logprobs, whose last bits depend on how fast answers come; choose current",
        ),
        (
            f"environment {algorithm.name}.overlong",
            getattr(options, "overlong", "") == "shape",
            "shape measures the length of a response of one turn; choose keep or mask",
        ),
    ]


def _of_adapters(config: Config) -> Iterator[Rule]:
    lora, layers = config.lora, (ALL_LINEAR, *LINEAR_LAYERS)
    text = f"choose from {', '.join(layers)}"
    yield "lora.targets", not lora.targets or set(lora.targets) - set(layers), text
    for role, about in config.algorithm.roles.items():
        files, targets = config.files(role), lora.of_role(role).targets
        if role in lora.roles and lora.roles[role].targets is not None:
            yield f"lora.{role}.targets", not targets or set(targets) - set(layers), text
        is_other = config.models[role] and about.head == "lm" and has_own_head(files)
        yield f"models.{role}", is_other, "it is an adapter of a critic or reward model; give one of a language model"
        base = lora.base and files.adapter and other_base(files.adapter, lora.base)
        other = f"the adapter in {files.adapter} was made for {base}, whose weights are not those of lora.base; drop it"
        fix = "write lora.base as base_model_name_or_path into its adapter_config.json if they are the same weights"
        yield "lora.base", base, f"{other}, or {fix}"
