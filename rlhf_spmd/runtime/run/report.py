"""Combines the answers of all ranks: metrics of an iteration, samples before and after training, the result."""

import hashlib
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_spmd.config.epochs import length_of
from rlhf_spmd.config.options import Config, function_labels
from rlhf_spmd.errors import UserError
from rlhf_spmd.kernels.philox import random_bits
from rlhf_spmd.model.texts.template_time import format_time
from rlhf_spmd.model.texts.tokenizer_files import TOKENIZER_FILES
from rlhf_spmd.plan.layout import format_ranks
from rlhf_spmd.plan.proof.memory_check import vain_streaming
from rlhf_spmd.plan.runtime_words import TIMEOUTS
from rlhf_spmd.runtime.checkpoint.resume import Resumed
from rlhf_spmd.runtime.data.precomputed import folder_fingerprint, padded_models
from rlhf_spmd.runtime.data.prompts import PromptSet, pad
from rlhf_spmd.runtime.execute.handlers.context import RunState
from rlhf_spmd.runtime.execute.handlers.infer import judges
from rlhf_spmd.runtime.execute.response_hashes import tokens_sha256
from rlhf_spmd.runtime.generation import random_streams
from rlhf_spmd.runtime.generation.rollout import generate_rows
from rlhf_spmd.runtime.guard.last_checkpoint import resume_command
from rlhf_spmd.runtime.observe.metric_sums import combine
from rlhf_spmd.runtime.records.console import Result
from rlhf_spmd.runtime.records.run_folder import RunFolder, Sample, Shown
from rlhf_spmd.runtime.rewards.response_scores import how_read
from rlhf_spmd.runtime.run.forecast_report import Compared
from rlhf_spmd.runtime.run.inputs import functions_fingerprints
from rlhf_spmd.runtime.run.job import Job
from rlhf_spmd.runtime.run.metrics import metrics_of
from rlhf_spmd.runtime.world.devices import describe_device


@dataclass(frozen=True, slots=True)
class Command:
    """How the user started the run: the strategy's name, --preset and --model, and the overrides."""

    strategy: str
    model: Sequence[str]
    overrides: Sequence[str]


def summarize(job: Job, answers: Sequence[Mapping], state: Any) -> dict:
    """Global metrics of one iteration, the same on every rank. state: of the algorithm when the iteration began; its
    numbers are metrics, too. A sum NAME_sq beside NAME becomes the standard deviation NAME_std."""
    metrics, weights = combine(answers)
    known = metrics_of(job.config.algorithm, job.program.workload.workflow, function_labels(job.config))
    for name in [name for name in metrics if f"{name}_sq" in metrics and f"{name}_sq" not in known]:
        square = metrics.pop(f"{name}_sq")
        if f"{name}_std" in known:
            metrics[f"{name}_std"] = math.sqrt(max(square - metrics[name] ** 2, 0.0))
        else:  # only `after_iteration` uses it
            metrics.pop(name)
    values = asdict(state) if state else {}
    metrics |= {name: value for name, value in values.items() if isinstance(value, float) and name in known}
    if "response_length" in metrics:
        metrics["gen_tokens"] = metrics["response_length"] * weights["response_length"]
        metrics["gen_tokens_per_s"] = metrics["gen_tokens"] / metrics["generate_s"]
    if TIMEOUTS in metrics:
        metrics[TIMEOUTS] = float(round(metrics[TIMEOUTS] * weights[TIMEOUTS]))
    for what in ("bytes", "messages"):
        metrics[f"moved_{what}"] = sum(answer["sent"][what] for answer in answers)
    if job.program.workload.workflow.generate_calls:
        metrics["tokens_sha256"] = tokens_sha256(answer["rows"] for answer in answers)
    return metrics


def num_timeouts(rows: Sequence[Mapping], samples: Sequence[Sample] = ()) -> int:
    """Responses for which a reward function ran out of time. rows: metrics of iterations and evaluations."""
    return int(sum(row.get(TIMEOUTS, 0.0) for row in rows)) + sum(sample.num_late for sample in samples)


def timeouts_note(num: int) -> str:
    """What the responses that ran out of time mean for a run; empty if there were none."""
    if not num:
        return ""
    return (
        f"a reward function ran out of reward_timeout_s for {num} responses, so this run cannot be repeated "
        "exactly: which responses those are depends on the speed of the machine"
    )


def check_finite(metrics: Mapping, number: int) -> None:
    """Raises UserError if a metric is not finite, before the next iteration spoils the weights further."""
    wrong = [name for name, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)]
    if wrong:
        raise UserError(
            f"iteration {number}: {', '.join(wrong)} is not finite; lower the learning rates or look at the scores"
        )


def facts(job: Job, folder: RunFolder) -> dict[str, str]:
    """The heading of a run. Collective."""
    config, shapes = job.config, job.program.workload.models
    sizes = {name: format_count(shape.num_params) for name, shape in shapes.items() if shape}
    by_function = config.reward_function
    both = by_function and config.reward_function_mode == "add"
    judged = {
        role: (f"{role} model + {by_function}" if both else by_function or f"{role} model")
        + (how_read(config, role, job.prompts) if job.world.rank == 0 else "")
        for role in shapes
        if config.algorithm.roles[role].judge
    }
    return {
        "models": ", ".join(f"{name} {size}" for name, size in sizes.items()) + f" parameters, {config.dtype}",
        **judged,
        **({"names": notes} if (notes := _names_of_functions(job)) else {}),
        "device": describe_device(job.world.computes, job.world.size),
        **({"products": f"by {job.products.library}, in {config.dtype}"} if job.products else {}),
        "rows" if config.algorithm.responses else "prompts": f"{len(job.prompts)} from {config.data.prompts}"
        + _lost(job.prompts),
        **({"time": f"{_minute(job.written_at)}, which the chat template writes"} if job.written_at else {}),
        "iteration": _iteration(job),
        **({"streaming": vain} if (vain := "; ".join(vain_streaming(job.program))) else {}),
        "run folder": str(folder.shown),
    }


def _names_of_functions(job: Job) -> str:
    """Which parameters of reward functions are not the columns of their names; empty if there are none. Collective."""
    if not (job.config.reward_function or job.config.eval.reward_function):
        return ""
    scorers = [one.calls.context.scorer for one in (job, job.evaluation) if one is not None]
    mine = [note for scorer in scorers if scorer is not None for note in scorer.notes]
    every = job.world.allgather(mine, "the names of reward functions")
    return "; ".join(dict.fromkeys(note for notes in every for note in notes))


def _iteration(job: Job) -> str:
    """What an iteration trains on, for the heading."""
    config = job.config
    epochs = config.options.epochs
    steps = f"mini-batches of {config.mini_batch}, {epochs} epoch{'s' * (epochs > 1)}"
    length = length_of(config, len(job.prompts))
    if job.program.workload.workflow.generate_calls:
        sizes = f"{config.rollout_batch} x {config.samples_per_prompt} prompts"
        longest = f"at most {config.generation.max_new_tokens} new tokens"
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
    """How many rows of the file were cut or dropped, and why."""
    done = {
        "cut at data.max_prompt": prompts.num_truncated,
        "with responses cut at generation.max_new_tokens": prompts.num_cut,
        "too long and dropped": prompts.num_dropped,
        "without an answer of the assistant and dropped": prompts.num_silent,
    }
    said = [*(f"{num} {what}" for what, num in done.items() if num), *prompts.remarks]
    return "".join(f", {one}" for one in said)


def _minute(time: str) -> str:
    return format_time(time, "%Y-%m-%d %H:%M")


def notes(job: Job, resumed: Resumed | None) -> list[str]:
    """What is to be said once at the start, below the heading."""
    found = list(resumed.notes) if resumed else []
    if resumed and not resumed.started and job.written_at:
        found.append(
            f"{resumed.folder} is of an earlier version, which did not keep the time of the first start; the chat "
            f"template writes {_minute(job.written_at)}, also when the run is resumed again"
        )
    if job.evaluation is not None:
        found += [f"{job.config.eval.prompts}: {remark}" for remark in job.evaluation.prompts.remarks]
    return found


def format_count(num: int) -> str:
    """1234567 -> "1.2 M"."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if num >= size:
            return f"{num / size:.1f} {letter}"
    return str(num)


def run_state(state: RunState) -> dict:
    """The state of a run besides weights, options and inputs, for a checkpoint."""
    return {"state": asdict(state.of_algorithm) if state.of_algorithm is not None else {}}


def inputs(job: Job) -> dict[str, str]:
    """Fingerprints of the files that a run reads, by name."""
    config = job.config
    found = job.prompts.fingerprints(config.data.prompts)
    if job.evaluation is not None:
        found |= job.evaluation.prompts.fingerprints(config.eval.prompts)
    found |= functions_fingerprints(config)
    if config.algorithm.from_file:
        found["algorithm"] = hashlib.sha256(config.algorithm.source.encode()).hexdigest()
    for folder in dict.fromkeys(filter(None, map(config.folder, config.algorithm.roles))):
        found[f"model in {folder}"] = folder_fingerprint(Path(folder))
        others = [Path(folder) / name for name in TOKENIZER_FILES if not name.endswith(".json")]  # those the hash lacks
        parts = [f"{path.name} ".encode() + path.read_bytes() for path in others if path.is_file()]
        found[f"tokenizer files in {folder}"] = hashlib.sha256(b"\0".join(parts)).hexdigest()
    return found


def refuse_other_support(job: Job, folder: Path, before: int | None) -> None:
    """Raises UserError if the run in a folder drew from other tokens. before: how many its checkpoint says; None: it
    is of a version that drew from all rows of the embeddings."""
    padded = padded_models(job.config, job.known)
    if before is None and padded:
        role, rows = next(iter(padded.items()))
        raise UserError(
            f"{folder} was started by a version of rlhf_spmd that gave all {rows} rows of the {role}'s embeddings a "
            f"probability; this version gives one only to the {job.known.count} tokens of the tokenizer, so the "
            "results would change on the way; resume it with that version, or start a new run"
        )
    if before not in (None, job.known.count):
        raise UserError(
            f"{folder} drew from {before} tokens, and the tokenizer of {job.config.main_folder} now has "
            f"{job.known.count}; restore the tokenizer's files, or start a new run"
        )


def surroundings(job: Job) -> dict[str, str]:
    """The environment that the last bits of a run's numbers depend on: name -> value, or the values with their ranks
    if they differ. Collective."""
    mine = {
        "stable program": job.program.fingerprint,  # "program", in earlier versions, named classes
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "device": "CPU" if job.world.computes.index is None else torch.cuda.get_device_name(job.world.computes.index),
    }
    every, found = job.world.allgather(mine, "the surroundings"), {}
    for name in mine:
        ranks_of: dict[str, list[int]] = {}
        for rank, theirs in enumerate(every):
            ranks_of.setdefault(theirs[name], []).append(rank)
        parts = [f"{value} (ranks {format_ranks(tuple(ranks))})" for value, ranks in ranks_of.items()]
        found[name] = ", ".join(parts) if len(parts) > 1 else mine[name]
    return found


def changed(now: Mapping[str, str], before: Mapping[str, str]) -> str:
    """A note for a run that is resumed in another environment than its checkpoint was made in; else empty."""
    parts = []
    for name in now:
        if before.get(name, now[name]) != now[name]:
            parts.append(
                "another program" if name == "stable program" else f"{name} {now[name]} instead of {before[name]}"
            )
    return f"{', '.join(parts)}: from here on numbers may differ in their last digits" if parts else ""


def next_commands(command: Command | None, ranks: int, folder: RunFolder, config: Config) -> dict[str, str]:
    """Purpose -> command to try after a run. command: the one that started it; None if it was resumed."""
    go_on = {}
    if config.optimizer.schedule == "constant":  # otherwise the learning rate has reached its end
        twice = (
            f"data.epochs={2 * config.data.epochs:g}" if config.data.epochs else f"iterations={2 * config.iterations}"
        )
        go_on["train on"] = f"{resume_command(folder.shown, ranks)} {twice}"
    if command is None:
        return go_on
    if command.strategy == "auto":  # the planned strategy can be checked and run again
        command = replace(command, strategy=str(folder.shown / "strategy.py"))
    check = ["check", command.strategy, "--layout", f"1x{ranks}", *command.model, *command.overrides]
    others = [word for word in command.overrides if not word.startswith(("iterations=", "data.epochs="))]
    train = ["train", "--strategy", command.strategy, *command.model, *others, "iterations=3"]
    return go_on | {
        "see the placement": f"python -m rlhf_spmd {shlex.join(check)}",
        "change an option": f"mpirun -n {ranks} python -m rlhf_spmd {shlex.join(train)}",
        "write a strategy": f"cp strategies/_template.py mine.py; python -m rlhf_spmd check mine.py --layout 1x{ranks}",
    }


def sample_responses(job: Job) -> list[Shown]:
    """Responses to the first prompts, always with the same random numbers, and their scores.

    Every rank that generates or scores takes part, because ZeRO 3 gathers weights collectively. Collective; returns the
    same on every rank.
    """
    workflow, layouts = job.program.workload.workflow, job.program.placement.layouts
    num = min(job.config.num_samples, len(job.prompts))
    if num == 0 or not workflow.generate_calls:
        return []
    generating = workflow.generate_calls[0]
    scoring = next((call for call in workflow.placed_calls if judges(job.calls.context, call)), None)
    rank, device = job.world.rank, job.world.device
    prompts_BP = pad(job.prompts.prompts[:num]).to(device)
    tokens: list[list[int]] = []
    if rank in layouts[generating.name].ranks:
        rows, width = (np.arange(num), np.zeros(num, int)), job.config.generation.max_new_tokens
        bits_BG = random_bits(job.config.seed, random_streams.SAMPLES, 0, *rows, width)
        with job.models.weights(generating) as model:
            responses_BG, *_ = generate_rows(
                model, prompts_BP, torch.from_numpy(bits_BG).to(device), **job.calls.context.drawing
            )
        tokens = responses_BG.tolist()
    first = layouts[generating.name].model_ranks(layouts[generating.name].ranks[0])[-1]
    everyone = job.world.allgather(tokens if rank == first else [], "the samples")
    tokens = next(found for found in everyone if found)
    scored: tuple[list[float], list[int]] = [], []  # and rows that ran out of time
    if scoring is not None and rank in layouts[scoring.name].ranks:
        responses_BG = torch.tensor(tokens, dtype=torch.int64, device=device)
        # one copy of the model scores; the other ranks only take part in gathering weights
        mine = num if rank in layouts[scoring.name].model_ranks(layouts[scoring.name].ranks[0]) else 0
        judged = job.calls.scores(scoring, prompts_BP[:mine], responses_BG[:mine], range(mine))
        scored = scored if judged is None else (judged.scores_B.tolist(), sorted(judged.late))
    everyone = job.world.allgather(scored, "the samples' scores")
    scores = next((found for found, _ in everyone if found), [math.nan] * num)
    late = {row for _, rows in everyone for row in rows}
    texts = [
        job.tokenizer.decode_pair(prompt, row)[1] for prompt, row in zip(job.prompts.prompts, tokens, strict=False)
    ]
    return [(text, score, row in late) for row, (text, score) in enumerate(zip(texts, scores, strict=True))]


def join_samples(job: Job, before: Sequence[Shown], after: Sequence[Shown] | None = None) -> list[Sample]:
    """The responses before and, if there are any, after training, by prompt."""
    pairs = zip(before, after or [(None, None, False)] * len(before), strict=True)
    return [
        Sample(index, job.prompts.texts[index], *old[:2], *new[:2], old[2], new[2])
        for index, (old, new) in enumerate(pairs)
    ]


def result(
    job: Job,
    strategy: str,
    history: Sequence[Mapping],
    wall_s: float,
    folder: RunFolder,
    compared: Compared | None,
    num_late: int,
) -> Result:
    """The result of a run. compared: its comparison with the forecast, if there was one. num_late: responses for which
    a reward function ran out of time."""
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
        iteration_s=compared.whole.measured_s if compared else math.nan,
        forecast_s=compared.whole.forecast_s if compared else math.nan,
        scaled_by=compared.scaled_by if compared else math.nan,
        wall_s=wall_s,
        run_dir=str(folder.shown),
        reward_timeouts=num_late,
        saved=tuple(role for role in job.program.workload.workflow.trained_models if algorithm.roles[role].saved),
    )
