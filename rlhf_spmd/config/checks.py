"""Options that contradict each other."""

import dataclasses

from rlhf_spmd.config.evaluation_metrics import metric_names
from rlhf_spmd.config.options import (
    OLD,
    Config,
    Evaluation,
    RolloutFiles,
    evaluated,
    function_labels,
    prompt_files,
    split_functions,
)
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.adapters.uniform import has_own_head, other_base
from rlhf_spmd.pages.option_suggestions import did_you_mean
from rlhf_spmd.pages.option_values import TEMPLATE_KWARGS, check_template_kwargs, text_of
from rlhf_spmd.plan.adapters import ALL_LINEAR, LINEAR_LAYERS
from rlhf_spmd.plan.workflow import Compute, Generate, check_temperature

# options of an evaluation that concern generated responses
GENERATED = ("samples_per_prompt", "temperature", "max_new_tokens", "reward_function", "right_at")
# Of an iteration: optimizer steps that `check` goes through in a minute, and rows whose order a rank can hold.
MOST_STEPS, MOST_SEQUENCES = 10_000, 2**20
MOST_COUNTED_EPOCHS = 1000  # whose steps are cut by a budget of tokens: seconds for small sets
Rule = tuple[object, str]  # whether it is broken (by its truth), and what to say then

OF_THE_PACKAGE = ("rlhf_spmd.rewards:", "rlhf_spmd.embedded.table_tools:")


def foreign_functions(*texts: str) -> list[str]:
    """Returns the reward functions and environments that options name, without those of the package."""
    specs = dict.fromkeys(spec for text in texts for spec in split_functions(text))
    return [spec for spec in specs if not spec.startswith(OF_THE_PACKAGE)]


def check_options(config: Config) -> None:
    """Raises UserError, which has a line for each contradiction."""
    check_temperature("generation.temperature", config.generation.temperature, or_zero=False)
    check_template_kwargs(TEMPLATE_KWARGS, config.data.chat_template_kwargs)
    rules = [*_of_sizes(config), *_of_data(config), *_of_rewards(config), *_of_evaluation(config)]
    rules += [*_of_episodes(config), *_of_learning_rates(config), *_of_logging(config), *_of_lora(config)]
    if problems := [text for is_broken, text in rules if is_broken]:
        raise UserError("\n".join(problems))
    sizes = {name: getattr(config, name) for name in ("rollout_batch", "samples_per_prompt", "mini_batch")}
    sizes["max_new_tokens"] = config.generation.max_new_tokens
    if problem := config.algorithm.problem(config.options, **sizes):
        raise UserError(f"algorithm {config.algorithm.name}: {problem}")


def _of_sizes(config: Config) -> list[Rule]:
    generation, name = config.generation, config.algorithm.name
    sequences = config.rollout_batch * config.samples_per_prompt
    is_whole = type(config.options.epochs) is int and config.options.epochs > 0  # a page may have it of any type
    num_steps = sequences // config.mini_batch * (config.options.epochs if is_whole else 1)
    product = f"rollout_batch {config.rollout_batch} x samples_per_prompt {config.samples_per_prompt}"
    return [
        (
            sequences % config.mini_batch,
            f"{product} = {sequences} sequences are not a multiple of mini_batch {config.mini_batch}; change one of "
            "them",
        ),
        (
            (generation.top_p < 1 or generation.min_p > 0) and not generation.top_k,
            "generation.top_p and generation.min_p need generation.top_k, which bounds the sets that are stored; "
            "e.g. generation.top_k=200",
        ),
        (
            generation.min_new_tokens > generation.max_new_tokens,
            f"generation.min_new_tokens={generation.min_new_tokens} is larger than "
            f"generation.max_new_tokens={generation.max_new_tokens}",
        ),
        (not is_whole, f"{name}.epochs={config.options.epochs}: give a whole number of at least 1"),
        (
            num_steps > MOST_STEPS or sequences > MOST_SEQUENCES,
            f"{product} = {sequences:,} sequences and {num_steps:,} optimizer steps (mini_batch {config.mini_batch}, "
            f"epochs {config.options.epochs}) are too many for one iteration, of at most {MOST_SEQUENCES:,} and "
            f"{MOST_STEPS:,}; lower rollout_batch (and raise iterations) or samples_per_prompt, or raise mini_batch",
        ),
        (
            config.rollouts.format != RolloutFiles().format and not config.rollouts.every,
            f"rollouts.format={config.rollouts.format}: no samples are written; give rollouts.every=1, or drop the "
            "option",
        ),
    ]


def _of_data(config: Config) -> list[Rule]:
    data, files, name = config.data, prompt_files(config), config.algorithm.name
    rules: list[Rule] = [
        (
            data.weights and len(data.weights) != len(files),
            f"data.weights has {len(data.weights)} numbers for {len(files)} files of prompts "
            f"({', '.join(files) or 'data.prompts is empty'}); give one for each",
        ),
        (
            data.weights and data.epochs,
            f"data.epochs={data.epochs:g}: with data.weights each file has epochs of its own; give iterations, or drop "
            "data.weights",
        ),
    ]
    if not config.mini_batch_tokens:
        return rules
    given, roles = f"mini_batch_tokens={config.mini_batch_tokens}", config.algorithm.roles
    calls = config.algorithm.workflow(config.options).calls
    return [
        *rules,
        (
            any(isinstance(call, Generate | Compute) or roles[call.model].judge for call in calls),
            f"{given}: {name} computes data of rows before it trains on them; the limit is for algorithms that only "
            "learn from responses of the data set (sft, reward_model, dpo); drop the option",
        ),
        (
            config.options.epochs != 1,
            f"{given} and {name}.epochs={config.options.epochs}: a later pass over the rows of an iteration mixes its "
            f"steps; leave {name}.epochs at 1, and give data.epochs={config.options.epochs}",
        ),
        (
            data.epochs > MOST_COUNTED_EPOCHS,
            f"data.epochs={data.epochs:g}: with {given} the steps of each epoch are counted, of at most "
            f"{MOST_COUNTED_EPOCHS:,} epochs; give iterations instead",
        ),
        (
            data.weights,
            f"{given}: rows of files with data.weights are not cut into steps of so many tokens; drop one",
        ),
    ]


def _of_learning_rates(config: Config) -> list[Rule]:
    optimizer = config.optimizer
    return [
        (
            optimizer.warmup_steps and optimizer.warmup_ratio,
            f"optimizer.warmup_steps={optimizer.warmup_steps} and optimizer.warmup_ratio={optimizer.warmup_ratio:g} "
            "both say how long the warm-up is: give one of them",
        ),
        (
            optimizer.min_lr_ratio and optimizer.schedule == "constant",
            f"optimizer.min_lr_ratio={optimizer.min_lr_ratio:g}: optimizer.schedule=constant ends at the learning rate "
            "itself; give optimizer.schedule=cosine or linear, or drop the option",
        ),
    ]


def _of_logging(config: Config) -> list[Rule]:
    options = {name: getattr(config.logging, name) for name in ("entity", "group", "tags")}
    return [
        (
            value and not config.wandb,
            f"logging.{name}={text_of(value)} is for Weights & Biases; give wandb=PROJECT, or drop the option",
        )
        for name, value in options.items()
    ]


def _of_rewards(config: Config) -> list[Rule]:
    functions, labels = split_functions(config.reward_function), function_labels(config)
    return [
        (
            len(set(labels)) < len(labels),
            f"reward_function={config.reward_function}: two functions have one name in the log; rename one",
        ),
        (
            config.reward_weights and len(config.reward_weights) != len(functions),
            f"reward_weights has {len(config.reward_weights)} numbers for {len(functions)} reward functions "
            f"({', '.join(functions) or 'reward_function is empty'}); give one for each",
        ),
        (
            config.reward_timeout_s and not config.reward_workers,
            f"reward_timeout_s={config.reward_timeout_s:g} needs processes that can be ended, and a reward function "
            "runs in the rank itself; set reward_workers=2, or leave reward_timeout_s out",
        ),
        (
            config.reward_workers and not functions,
            f"reward_workers={config.reward_workers} are for reward functions, and reward_function is empty; give one, "
            "or leave reward_workers out",
        ),
    ]


def _of_episodes(config: Config) -> list[Rule]:
    width, most, name = config.episode.max_row_tokens, config.generation.max_new_tokens, config.algorithm.name
    given = f"environment={config.environment}"
    if not config.environment:
        what = "is for responses that an environment answers; give environment=FILE.py:NAME, or drop the option"
        has_turns = getattr(config.options, "turn_rewards", False)
        usual = dataclasses.asdict(type(config.episode)())
        limits = {key: one for key, one in dataclasses.asdict(config.episode).items() if one != usual[key]}
        return [
            *((True, f"episode.{key}={value} {what}") for key, value in limits.items()),
            (has_turns, f"{name}.turn_rewards=true {what}"),
            (config.forecast_episodes, f"forecast_episodes={config.forecast_episodes} {what}"),
        ]
    return [
        (
            0 < width < most,
            f"episode.max_row_tokens={width} is smaller than generation.max_new_tokens={most}, the drawn tokens among "
            "them; raise the one or lower the other",
        ),
        (
            not config.algorithm.workflow(config.options).generate_calls,
            f"{given}: algorithm {name} generates no responses; drop the option",
        ),
        (
            not hasattr(config.options, OLD),
            f"{given} needs {name}.{OLD}=recompute, and algorithm {name} has no such option; derive its Options from "
            "off_policy.Options",
        ),
        (
            getattr(config.options, OLD, "") == "loglinear",
            f"{given}: {name}.{OLD}=loglinear reads the sampler's logprobs, whose last bits depend on how fast answers "
            "come; choose current",
        ),
        (
            getattr(config.options, "overlong", "") == "shape",
            f"{given}: {name}.overlong=shape measures the length of a response of one turn; choose keep or mask",
        ),
    ]


def _of_lora(config: Config) -> list[Rule]:
    lora = config.lora
    named = {"lora.targets": lora.targets} | {f"lora.{role}.targets": one for role, one in lora.own_targets.items()}
    rules: list[Rule] = []
    for key, targets in named.items():
        known = (ALL_LINEAR, *LINEAR_LAYERS)
        unknown = [one for one in targets or () if one not in known]
        hint = did_you_mean(unknown[0], known) if unknown else ""
        rules.append(
            (
                unknown,
                f"{key}: no layer that can have adapters is called {', '.join(unknown)}{hint}; choose from "
                f"{', '.join(LINEAR_LAYERS)}, or {ALL_LINEAR} for all of them",
            )
        )
        rules.append((targets == (), f"{key} is empty: name a layer, or drop the option"))
    rules += [(True, text) for text in _without_adapters(config)]
    vain = lora.base and not any(config.files(role).adapter for role in config.algorithm.roles)
    rules.append((vain, f"lora.base={lora.base}: no model is given as the folder of an adapter; drop the option"))
    for role, about in config.algorithm.roles.items():
        if config.models[role] and about.head == "lm" and has_own_head(config.files(role)):
            text = f"models.{role}: {config.files(role).adapter} is the adapter of a critic or reward model (SEQ_CLS)"
            rules.append((True, f"{text}, and the {role} is a language model; give an adapter of one (CAUSAL_LM)"))
    for role in config.algorithm.roles if lora.base else ():
        if (folder := config.files(role).adapter) and (base := other_base(folder, lora.base)):
            text = (
                f"the {role} goes on from the adapter in {folder}, which was made for {base}, whose weights are not "
                f"those of lora.base={lora.base}; drop lora.base, or write {lora.base} as base_model_name_or_path into "
                f"{folder}/adapter_config.json if its weights are stored in other files there"
            )
            rules.append((True, text))
    return rules


def _without_adapters(config: Config) -> list[str]:
    """Returns an error for options of adapters where no model has any."""
    lora, usual, roles = config.lora, type(config.lora)(), config.algorithm.roles
    names = {"alpha": lora.alphas, "targets": lora.own_targets, "rslora": lora.own_rslora, "dropout": lora.dropouts}
    found: list[str] = []
    if not any(map(config.adapters, roles)):
        given = [(name, one) for name in names if (one := getattr(lora, name)) != getattr(usual, name)]
        found = [f"lora.{name}={text_of(one)}: no model has adapters; give lora.rank=16" for name, one in given]
    for role in config.algorithm.trained_roles:
        own = [(name, one) for name, of_roles in names.items() if (one := of_roles.get(role)) is not None]
        if own and config.adapters(role) is None:
            fix = f"has no adapters; give lora.{role}.rank=16"
            found += [f"lora.{role}.{name}={text_of(one)}: the {role} {fix}" for name, one in own]
    return [f"{text}, or drop the option" for text in found]


def _of_evaluation(config: Config) -> list[Rule]:
    evaluation, best = config.eval, config.checkpoint.best
    changed = {part.name: getattr(evaluation, part.name) for part in dataclasses.fields(Evaluation)}
    changed = {name: value for name, value in changed.items() if value != getattr(Evaluation(), name)}
    if not evaluation.prompts:
        given = [f"eval.{name}={text_of(value)}" for name, value in changed.items()] + [
            f"checkpoint.best={best}"
        ] * bool(best)
        return [
            (True, f"{one}: there is no evaluation without prompts; give eval.prompts=FILE, or drop the option")
            for one in given
        ]
    check_temperature("eval.temperature", evaluation.temperature)
    workflow = config.algorithm.workflow(config.options)
    of_responses = metric_names(evaluation.samples_per_prompt, function_labels(evaluated(config)))
    names = of_responses if workflow.generate_calls else [*config.algorithm.metrics]
    first = next(iter(names), "NAME")
    has, lacks = ("eval", "data") if evaluation.precomputed_logprobs else ("data", "eval")
    return [
        (
            workflow.repeated_calls and bool(evaluation.precomputed_logprobs) != bool(config.data.precomputed_logprobs),
            f"{has}.precomputed_logprobs replaces passes of models, which {lacks}.prompts would need, too: give "
            f"{lacks}.precomputed_logprobs=FILE (`precompute` with data.prompts={getattr(config, lacks).prompts}), or "
            "drop the option",
        ),
        *(
            (True, f"eval.{name}: algorithm {config.algorithm.name} generates no responses; drop the option")
            for name in GENERATED
            if name in changed and not workflow.generate_calls
        ),
        (
            best and best not in names and not best.startswith(tuple(f"{name}/" for name in names)),
            f"checkpoint.best={best}: the metrics of this evaluation are {', '.join(names)}, also of one data source, "
            f"as in {first}/gsm8k; choose one of them",
        ),
        (
            evaluation.patience and not best,
            f"eval.patience={evaluation.patience}: say which metric has to become better, e.g. checkpoint.best={first}",
        ),
        (
            evaluation.samples_per_prompt > 1 and not evaluation.temperature,
            f"eval.samples_per_prompt={evaluation.samples_per_prompt}: greedy responses to a prompt are all the same; "
            "give eval.temperature=1, or one sample",
        ),
    ]
