"""What a run says of itself at its beginning and at its end."""

import math
from collections.abc import Mapping, Sequence

from rlhf_spmd.config.epochs import length_of
from rlhf_spmd.kernels import one_shot
from rlhf_spmd.plan.program.tensors import numbers_in, trained_weights_of
from rlhf_spmd.plan.proof.memory_check import vain_streaming
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.runtime.checkpoint.resume import Resumed
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.records.console import Result
from rlhf_spmd.runtime.records.run_files import headlines_of
from rlhf_spmd.runtime.records.run_folder import RunFolder
from rlhf_spmd.runtime.rewards.response_scores import reads_text
from rlhf_spmd.runtime.run.forecast_report import Compared
from rlhf_spmd.runtime.run.prepare import Prepared
from rlhf_spmd.runtime.world.devices import describe_device


def facts(prepared: Prepared, folder: RunFolder) -> dict[str, str]:
    """Returns the heading of a run. Collective."""
    job, products = prepared.job, prepared.products
    config, shapes, prompts = job.config, job.workload.models, job.prompts
    sizes = [f"{name} {_size(shape)}" for name, shape in shapes.items() if shape]
    texts = {"models": f"{', '.join(sizes)} parameters, {config.dtype}", "adapters": _adapters(job)}
    texts["environment"] = config.environment
    for role, shape in shapes.items():
        if config.algorithm.roles[role].judge and (shape or config.reward_function):
            model, function = f"{role} model", config.reward_function
            both = f"{model} + {function}" if config.reward_function_mode == "add" else function
            read = " (has another tokenizer, so it is given text)" if reads_text(config, role) else ""
            texts[role] = f"{both if function else model}{read}"
    texts |= {"names": _names_of_functions(prepared), "device": describe_device(job.world.computes, job.world.size)}
    texts["tp sums"] = "; ".join(
        dict.fromkeys(filter(None, job.world.allgather(one_shot.description(), "the sums over tp")))
    )
    texts["products"] = f"by {products['library']}, in {config.dtype}" if products else ""
    rows = "rows" if config.algorithm.responses else "prompts"
    texts |= {rows: ", ".join([f"{len(prompts)} from {config.data.prompts}", *prompts.lost])}
    texts |= {"iteration": _iteration(job)}
    texts |= {"streaming": "; ".join(vain_streaming(job.program)), "run folder": str(folder.shown)}
    return {name: text for name, text in texts.items() if text}


def _size(shape: ModelShape) -> str:
    """Formats the number of parameters of a model, and of a mixture those that a token meets."""
    active = f" ({format_count(shape.num_active_params)} active)" if shape.num_experts else ""
    return format_count(shape.num_params) + active


def _adapters(job: Job) -> str:
    """Describes the adapters of each model, and its learning rate."""
    config, texts = job.config, []
    for name, shape in job.workload.models.items():
        if shape is not None and shape.adapters is not None:
            numbers = sum(numbers_in(weight.whole) for weight in trained_weights_of(shape))
            rate = f"learning rate {config.optimizer.lr[name]:g}" if name in config.optimizer.lr else "frozen"
            rank, scale = shape.adapters.rank, shape.adapters.scale
            texts.append(f"{name} rank {rank}, scale {scale:g}: {format_count(numbers)} numbers; {rate}")
    return "; ".join(texts)


def _names_of_functions(prepared: Prepared) -> str:
    """Says which parameters of reward functions are not the columns of their names, and which columns nothing reads;
    empty if there are none. Collective."""
    scorers = [job.scorer for job in (prepared.job, prepared.evaluation) if job is not None]
    of_rank = [note for scorer in scorers if scorer is not None for note in scorer.notes]
    every = prepared.job.world.allgather(of_rank, "the names of reward functions")
    return "; ".join(dict.fromkeys(note for notes in every for note in notes))


def _iteration(job: Job) -> str:
    """Describes what an iteration trains on, for the heading."""
    config, sizes = job.config, f"{job.config.rollout_batch} rows"
    if job.workload.workflow.generate_calls:
        rows = f" of {config.episode.rows} rows" if config.episode.rows > 1 else ""
        sizes = f"{config.rollout_batch} prompts x {config.samples_per_prompt} "
        sizes += f"response{'s' * (config.samples_per_prompt > 1)}{rows} of at most "
        sizes += f"{config.generation.max_new_tokens} new tokens"
        sizes += f" ({config.row_tokens} with answers)" if config.environment else ""
    budget = f" and at most {config.mini_batch_tokens} tokens" if config.mini_batch_tokens else ""
    steps = f"mini-batches of {config.mini_batch}{budget}, epochs: {config.options.epochs}"
    length = length_of(config, len(job.prompts)) or f"{config.iterations} iterations"
    return f"{sizes}, {steps}; {length}"


def notes(prepared: Prepared, resumed: Resumed | None) -> list[str]:
    """Returns the notes of the start, below the heading."""
    evaluation = prepared.evaluation
    lost, path = evaluation.prompts.lost if evaluation else (), prepared.job.config.eval.prompts
    notes = [*(resumed.notes if resumed else ()), *(f"{path}: {text}" for text in lost)]
    if prepared.job.models.are_random:
        notes.append("the models have random weights: this run measures speed and memory, and keeps no weights")
    return notes


def format_count(num: int) -> str:
    """Formats a count: 1234567 -> "1.2 M"."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if num >= size:
            return f"{num / size:.1f} {letter}"
    return str(num)


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
    last, algorithm = history[-1], job.config.algorithm
    headlines = [name for name in headlines_of(algorithm.metrics) if name in last]
    speed = None
    if "gen_tokens" in last:
        speed = sum(row["gen_tokens"] for row in history) / sum(row["generate_s"] for row in history)
    whole, scaled_by = (compared.whole, compared.scaled_by) if compared else (None, None)
    return Result(
        strategy=strategy,
        ranks=job.world.size,
        iterations=len(history),
        headlines={name: (next(row[name] for row in history if name in row), last[name]) for name in headlines},
        gen_tokens_per_s=speed,
        parity_max_abs=max((metrics.get("parity_max_abs", math.nan) for metrics in history), default=math.nan),
        iteration_s=whole.measured_s if whole else None,
        forecast_s=whole.forecast_s if whole else None,
        scaled_by=scaled_by,
        wall_s=wall_s,
        run_dir=str(folder.shown),
        reward_timeouts=num_late,
        saved=tuple(role for role in job.workload.workflow.trained_models if algorithm.roles[role].saved)
        if not job.models.are_random
        else (),
    )
