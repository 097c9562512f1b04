"""What a run says of itself at its beginning and at its end."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_spmd.config.epochs import length_of
from rlhf_spmd.config.options import function_labels
from rlhf_spmd.config.presets import has_adapter_rate
from rlhf_spmd.plan.adapters import ALL_LINEAR, LINEAR_LAYERS
from rlhf_spmd.plan.program.tensors import trained_weights_of
from rlhf_spmd.plan.proof.memory_check import vain_streaming
from rlhf_spmd.runtime.checkpoint.resume import Resumed
from rlhf_spmd.runtime.data.prompts import PromptSet
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.records.console import Result
from rlhf_spmd.runtime.records.run_folder import RunFolder
from rlhf_spmd.runtime.rewards.response_scores import reads_text
from rlhf_spmd.runtime.run.forecast_report import CallSeconds, Compared
from rlhf_spmd.runtime.world.devices import describe_device


def facts(job: Job, folder: RunFolder) -> dict[str, str]:
    """Returns the heading of a run. Collective."""
    config, shapes = job.config, job.program.workload.models
    sizes = {name: format_count(shape.num_params) for name, shape in shapes.items() if shape}
    by_function = config.reward_function
    both = by_function and config.reward_function_mode == "add"
    judged = {
        role: (f"{role} model + {by_function}" if both else by_function or f"{role} model")
        + (" (has another tokenizer, so it is given text)" if reads_text(config, role) else "")
        for role in shapes
        if config.algorithm.roles[role].judge
    }
    return {
        "models": ", ".join(f"{name} {size}" for name, size in sizes.items()) + f" parameters, {config.dtype}",
        **({"adapters": text} if (text := _adapters(job)) else {}),
        **judged,
        **({"names": notes} if (notes := _names_of_functions(job)) else {}),
        "device": describe_device(job.world.computes, job.world.size),
        **({"products": f"by {job.products['library']}, in {config.dtype}"} if job.products else {}),
        "rows" if config.algorithm.responses else "prompts": f"{len(job.prompts)} from {config.data.prompts}"
        + _lost(job.prompts),
        "iteration": _iteration(job),
        **({"streaming": vain} if (vain := "; ".join(vain_streaming(job.program))) else {}),
        "run folder": str(folder.shown),
    }


def _adapters(job: Job) -> str:
    """Describes, for each model with adapters, these and its learning rate; and which models have a base in common."""
    config, workload, texts = job.config, job.program.workload, []
    for name, shape in workload.models.items():
        if shape is None or (own := shape.adapters) is None:
            continue
        numbers = sum(weight.layers * weight.rows * weight.columns for weight in trained_weights_of(shape))
        layers = ALL_LINEAR if own.targets == LINEAR_LAYERS else ", ".join(own.targets)
        rate = f"learning rate {config.optimizer.lr[name]:g}" if name in config.optimizer.lr else "frozen"
        rate += ", ten times that of full training" if has_adapter_rate(config, name) else ""
        rate += f"; from {folder}" if (folder := config.files(name).adapter) else ""
        texts.append(f"{name} rank {own.rank}, scale {own.scale:g}, {layers}: {format_count(numbers)} numbers; {rate}")
    texts += ["generation with copies of the weights that have them"] if workload.adds_adapters else []
    for base in dict.fromkeys(workload.bases.values()):
        names = [name for name in workload.bases if workload.bases[name] == base]
        texts += [f"{' and '.join(names)} have their frozen weights in common"] if len(names) > 1 else []
    return "; ".join(texts)


def _names_of_functions(job: Job) -> str:
    """Says which parameters of reward functions are not the columns of their names, and which columns nothing reads;
    empty if there are none. Collective."""
    scorers = [one.scorer for one in (job, job.evaluation) if one is not None]
    mine = [note for scorer in scorers if scorer is not None for note in scorer.notes]
    every = job.world.allgather(mine, "the names of reward functions")
    return "; ".join(dict.fromkeys(note for notes in every for note in notes))


def _iteration(job: Job) -> str:
    """Describes what an iteration trains on, for the heading."""
    config = job.config
    epochs = config.options.epochs
    steps = f"mini-batches of {config.mini_batch}, {epochs} epoch{'s' * (epochs > 1)}"
    length = length_of(config, len(job.prompts))
    if job.program.workload.workflow.generate_calls:
        samples = config.samples_per_prompt
        sizes = f"{config.rollout_batch} prompts x {samples} sample{'s' * (samples > 1)}"
        longest = f"at most {config.generation.max_new_tokens} new tokens"
        if config.environment:
            longest += f", {config.row_tokens} with answers; old logprobs by one more pass of the actor"
        return "; ".join(filter(None, [f"{sizes}, {steps}, {longest}", length]))
    if config.mini_batch_tokens:
        num = config.rollout_batch // config.mini_batch
        sizes = f"{num} step{'s' * (num > 1)} of at most {config.mini_batch} rows and {config.mini_batch_tokens} tokens"
        return f"{sizes}; {f'{length}: ' * bool(length)}{config.iterations} iterations"
    if length:
        return f"{config.rollout_batch} rows, {steps}; {length}"
    passes = config.iterations * config.rollout_batch / len(job.prompts)
    return f"{config.rollout_batch} rows, {steps}; all {config.iterations} iterations read the set {passes:.3g} times"


def _lost(prompts: PromptSet) -> str:
    """Says how many rows of the file were cut or dropped, and why."""
    done = {
        "cut at data.max_prompt": prompts.num_truncated,
        "with responses cut at generation.max_new_tokens": prompts.num_cut,
        "too long and dropped": prompts.num_dropped,
        "without an answer of the assistant to learn and dropped": prompts.num_silent,
    }
    said = [*(f"{num} {what}" for what, num in done.items() if num), *prompts.remarks]
    return "".join(f", {one}" for one in said)


def notes(job: Job, resumed: Resumed | None) -> list[str]:
    """Returns what is to be said once at the start, below the heading."""
    found = list(resumed.notes) if resumed else []
    if job.evaluation is not None:
        found += [f"{job.config.eval.prompts}: {remark}" for remark in job.evaluation.prompts.remarks]
        best, functions = job.config.checkpoint.best, function_labels(job.evaluation.config)
        if functions and "@" in best.partition("/")[0]:
            found.append(f"checkpoint.best={best} is of the weighted sum; {functions[0]}/{best} is of one function")
    return found


def format_count(num: int) -> str:
    """Formats a count: 1234567 -> "1.2 M"."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if num >= size:
            return f"{num / size:.1f} {letter}"
    return str(num)


def next_command(folder: RunFolder) -> list[str]:
    """Returns the arguments of the command to try after a run."""
    page = folder.shown / "report.html"
    return ["python", "-m", "rlhf_spmd", "report", str(folder.shown), "--out", str(page)]


def result(
    job: Job,
    strategy: str,
    history: Sequence[Mapping],
    wall_s: float,
    folder: RunFolder,
    compared: Compared | None,
    num_late: int,
) -> Result:
    """Returns the result of a run.

    compared: its comparison with the forecast, if there was one.
    num_late: responses for which a reward function ran out of time.
    """
    first, last, algorithm = history[0], history[-1], job.config.algorithm
    headlines = [name for name, metric in algorithm.metrics.items() if metric.headline is not None and name in last]
    generates = "gen_tokens" in last
    seconds = sum(metrics["generate_s"] for metrics in history) if generates else math.nan
    return Result(
        strategy=strategy,
        ranks=job.world.size,
        iterations=len(history),
        headlines={name: (first.get(name, math.nan), last[name]) for name in headlines},
        gen_tokens_per_s=sum(metrics["gen_tokens"] for metrics in history) / seconds if generates else math.nan,
        parity_max_abs=max((metrics.get("parity_max_abs", math.nan) for metrics in history), default=math.nan),
        **forecast_seconds(compared),
        wall_s=wall_s,
        run_dir=str(folder.shown),
        reward_timeouts=num_late,
        saved=tuple(role for role in job.program.workload.workflow.trained_models if algorithm.roles[role].saved),
    )


def forecast_seconds(compared: Compared | None) -> dict[str, Any]:
    """Returns the fields of a Result that compare a run with its forecast; NaN without one."""
    whole, scaled_by = (compared.whole, compared.scaled_by) if compared else (CallSeconds("", None, math.nan), None)
    return {
        "iteration_s": whole.measured_s,
        "forecast_s": math.nan if whole.forecast_s is None else whole.forecast_s,
        "scaled_by": math.nan if scaled_by is None else scaled_by,
    }
