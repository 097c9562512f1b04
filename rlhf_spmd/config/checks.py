"""Options that contradict each other."""

import dataclasses

from rlhf_spmd.config.evaluation_metrics import metric_names
from rlhf_spmd.config.options import Config, Evaluation, RolloutFiles, function_labels, prompt_files, split_functions
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.option_values import TEMPLATE_KWARGS, check_template_kwargs
from rlhf_spmd.plan.workflow import Compute, Generate, check_temperature

# options of an evaluation that concern generated responses
GENERATED = ("samples_per_prompt", "temperature", "max_new_tokens", "reward_function", "right_at")
# Of an iteration: optimizer steps that `check` goes through in a minute, and rows whose order a rank can hold.
MOST_STEPS, MOST_SEQUENCES = 10_000, 2**20
MOST_COUNTED_EPOCHS = 1000  # whose steps are cut by a budget of tokens: seconds for small sets


def foreign_functions(*texts: str) -> list[str]:
    """The reward functions that options name, without those of the package."""
    specs = dict.fromkeys(spec for text in texts for spec in split_functions(text))
    return [spec for spec in specs if not spec.startswith("rlhf_spmd.rewards:")]


def check_options(config: Config) -> None:
    """Raises UserError if options contradict each other."""
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
    check_temperature("generation.temperature", generation.temperature, or_zero=False)
    if generation.min_new_tokens > generation.max_new_tokens:
        raise UserError(
            f"generation.min_new_tokens={generation.min_new_tokens} is larger than "
            f"generation.max_new_tokens={generation.max_new_tokens}"
        )
    if len(set(labels := function_labels(config))) < len(labels):
        raise UserError(f"reward_function={config.reward_function}: two functions have one name in the log; rename one")
    if type(config.options.epochs) is not int or config.options.epochs < 1:
        name = config.algorithm.name
        raise UserError(f"{name}.epochs={config.options.epochs}: give a whole number of at least 1")
    num_steps = sequences // config.mini_batch * config.options.epochs
    if num_steps > MOST_STEPS or sequences > MOST_SEQUENCES:
        raise UserError(
            f"rollout_batch {config.rollout_batch} x samples_per_prompt {config.samples_per_prompt} = {sequences:,} "
            f"sequences and {num_steps:,} optimizer steps (mini_batch {config.mini_batch}, epochs "
            f"{config.options.epochs}) are too many for one iteration, of at most {MOST_SEQUENCES:,} and "
            f"{MOST_STEPS:,}; lower rollout_batch (and raise iterations) or samples_per_prompt, or raise mini_batch"
        )
    check_template_kwargs(TEMPLATE_KWARGS, config.data.chat_template_kwargs)
    files = prompt_files(config)
    if config.data.weights and len(config.data.weights) != len(files):
        raise UserError(
            f"data.weights has {len(config.data.weights)} numbers for {len(files)} files of prompts "
            f"({', '.join(files) or 'data.prompts is empty'}); give one for each"
        )
    if config.data.weights and config.data.epochs:
        raise UserError(
            f"data.epochs={config.data.epochs:g}: with data.weights each file has epochs of its own; give iterations, "
            "or drop data.weights"
        )
    if config.mini_batch_tokens:
        _check_budget(config)
    functions = split_functions(config.reward_function)
    if config.reward_weights and len(config.reward_weights) != len(functions):
        raise UserError(
            f"reward_weights has {len(config.reward_weights)} numbers for {len(functions)} reward functions "
            f"({', '.join(functions) or 'reward_function is empty'}); give one for each"
        )
    _check_evaluation(config)
    if config.reward_timeout_s and not config.reward_workers:
        raise UserError(
            f"reward_timeout_s={config.reward_timeout_s:g} needs processes that can be ended, and a reward function "
            "runs in the rank itself; set reward_workers=2, or leave reward_timeout_s out"
        )
    if config.reward_workers and not functions:
        raise UserError(
            f"reward_workers={config.reward_workers} are for reward functions, and reward_function is empty; give one, "
            "or leave reward_workers out"
        )
    if config.rollouts.format != RolloutFiles().format and not config.rollouts.every:
        raise UserError(
            f"rollouts.format={config.rollouts.format}: no samples are written; give rollouts.every=1, or drop the "
            "option"
        )
    sizes = {name: getattr(config, name) for name in ("rollout_batch", "samples_per_prompt", "mini_batch")}
    sizes["max_new_tokens"] = generation.max_new_tokens
    if problem := config.algorithm.problem(config.options, **sizes):
        raise UserError(f"algorithm {config.algorithm.name}: {problem}")


def _check_budget(config: Config) -> None:
    """Raises UserError for options that do not go with a budget of tokens."""
    given, name, roles = f"mini_batch_tokens={config.mini_batch_tokens}", config.algorithm.name, config.algorithm.roles
    workflow = config.algorithm.workflow(config.options)
    if any(isinstance(call, Generate | Compute) or roles[call.model].judge for call in workflow.calls):
        raise UserError(
            f"{given}: {name} makes data of rows before it trains on them; a budget is for algorithms that only learn "
            "from responses of the data set (sft, reward_model, dpo); drop the option"
        )
    if config.options.epochs > 1:
        raise UserError(
            f"{given} and {name}.epochs={config.options.epochs}: a later pass over the rows of an iteration mixes its "
            f"steps; leave {name}.epochs at 1, and give data.epochs={config.options.epochs}"
        )
    if config.data.epochs > MOST_COUNTED_EPOCHS:
        raise UserError(
            f"data.epochs={config.data.epochs:g}: with {given} the steps of each epoch are counted, of at most "
            f"{MOST_COUNTED_EPOCHS:,} epochs; give iterations instead"
        )
    if config.data.weights:
        raise UserError(f"{given}: rows of files with data.weights are not cut into steps of so many tokens; drop one")


def _check_evaluation(config: Config) -> None:
    """Raises UserError for options of an evaluation that there is not, and for a metric that it does not have."""
    evaluation, best = config.eval, config.checkpoint.best
    if not evaluation.prompts:
        values = {part.name: getattr(evaluation, part.name) for part in dataclasses.fields(Evaluation)}
        given = [f"eval.{name}={value}" for name, value in values.items() if value != getattr(Evaluation(), name)]
        given += [f"checkpoint.best={best}"] if best else []
        if given:
            raise UserError(
                f"{given[0]}: there is no evaluation without prompts; give eval.prompts=FILE, or drop the option"
            )
        return
    differ = bool(evaluation.precomputed_logprobs) != bool(config.data.precomputed_logprobs)
    if differ and config.algorithm.workflow(config.options).repeated_calls:
        has, lacks = ("eval", "data") if evaluation.precomputed_logprobs else ("data", "eval")
        raise UserError(
            f"{has}.precomputed_logprobs replaces passes of models, which {lacks}.prompts would need, too: give "
            f"{lacks}.precomputed_logprobs=FILE (`precompute` with data.prompts={getattr(config, lacks).prompts}), or "
            "drop the option"
        )
    names = metric_names(evaluation.samples_per_prompt)
    if not config.algorithm.workflow(config.options).generate_calls:
        names = list(config.algorithm.metrics)
        given = [f"eval.{name}" for name in GENERATED if getattr(evaluation, name) != getattr(Evaluation(), name)]
        if given:
            raise UserError(f"{given[0]}: algorithm {config.algorithm.name} generates no responses; drop the option")
    if best and best.partition("/")[0] not in names:
        raise UserError(
            f"checkpoint.best={best}: the metrics of this evaluation are {', '.join(names)}, also of one data source, "
            f"as in {names[0]}/gsm8k; choose one of them"
        )
    if evaluation.patience and not best:
        raise UserError(
            f"eval.patience={evaluation.patience}: say which metric has to become better, e.g. "
            f"checkpoint.best={names[0]}"
        )
    check_temperature("eval.temperature", evaluation.temperature)
    if evaluation.samples_per_prompt > 1 and not evaluation.temperature:
        raise UserError(
            f"eval.samples_per_prompt={evaluation.samples_per_prompt}: greedy responses to a prompt are all the same; "
            "give eval.temperature=1, or one sample"
        )
