"""Evaluations between the iterations of a run: responses to prompts that are not trained on, scored and counted; or the
losses of given responses that are not trained on.

All ranks compute the same metrics from the scores of all responses, so they agree on the best checkpoint and on the end
of the run without a further message. The rows are in evaluations.jsonl; a run without eval.prompts has none.

pass@k says something only where a response is right or wrong. So an evaluation with another score than 0 and 1 has
none, unless the user asks for it (`wants_passes`). Where the score is a sum, this holds for each function; of the sum
pass@k is only given where it is asked for.
"""

# M mini-batches (one), C columns, N prompts

import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_spmd.config.evaluation_metrics import (
    PASS,
    STANDARD_ERROR,
    best_row,
    measure_by_source,
    metric_names,
    titled,
    without_passes,
)
from rlhf_spmd.config.options import Config, evaluated, function_labels
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.printing import formatted
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.runtime_words import SCORES, TIMEOUTS
from rlhf_spmd.runtime.execute.executor import Executor
from rlhf_spmd.runtime.execute.instruction_loop import InstructionLoop
from rlhf_spmd.runtime.execute.iteration import Iteration, given_rows
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.execute.response_hashes import tokens_sha256
from rlhf_spmd.runtime.generation import random_streams
from rlhf_spmd.runtime.records.run_files import headlines_of
from rlhf_spmd.runtime.records.run_folder import EVALUATIONS, RunFolder
from rlhf_spmd.runtime.run.inputs import sources_of
from rlhf_spmd.runtime.run.metrics import ALL_BROKE, check_finite
from rlhf_spmd.runtime.run.prepare import Prepared, prepare
from rlhf_spmd.runtime.run.rollouts import Rollouts, numbers_of_rows
from rlhf_spmd.runtime.world.metric_sums import combine
from rlhf_spmd.runtime.world.trace import Tracer
from rlhf_spmd.runtime.world.world import World


class Evaluation:
    """The evaluation of all prompts of a job, whose program generates and scores responses, or measures losses."""

    def __init__(self, job: Job):
        self.job = job
        world = job.world
        self.executor = Executor(job, Tracer(world.rank, world.hosts[world.rank]))  # not a part of a run's timeline
        self.sources = sources_of(job.prompts, job.workload.rollout_batch)

    @property
    def scores(self) -> bool:
        """Whether responses are generated and scored."""
        return bool(self.job.workload.workflow.generate_calls)

    def run(self, num_done: int) -> tuple[dict[str, float | str], Iteration]:
        """Runs an evaluation. Returns the metrics, the same on all ranks, and this rank's rows. Collective.

        num_done: iterations before it, which choose its random numbers.
        """
        began = time.perf_counter()
        self.executor.begin()
        data = self._iteration(num_done)
        answers = self.executor.iteration(data)
        if not self.scores:
            metrics: dict[str, float | str] = dict(combine(answers)[0])
            check_finite(metrics, data.title)
            return metrics | {"evaluation_s": time.perf_counter() - began}, data
        numbers, functions = numbers_of_rows(self.job, data), function_labels(self.job.config)
        metrics = self._metrics(self._measured(numbers), answers)
        metrics = without_passes(metrics) if functions and not wants_passes(self.job.config) else metrics
        for function in functions:
            metrics |= self._measured(numbers, function)
        return metrics | {"evaluation_s": time.perf_counter() - began}, data

    def _iteration(self, num_done: int) -> Iteration:
        """Returns all prompts of the set as one mini-batch."""
        job, workload = self.job, self.job.workload
        samples = workload.samples_per_prompt
        prompt_MC = np.arange(workload.rollout_batch).repeat(samples)[None]
        sample_MC = np.tile(np.arange(samples), workload.rollout_batch)[None]
        store = given_rows(workload, job.prompts, job.columns, prompt_MC, job.world.device)
        about: dict[str, Any] = {"what": "evaluation after iteration", "first": 0}
        return Iteration.of_rows(job.config.seed, num_done, prompt_MC, store, sample_MC, **about)

    def _measured(self, numbers: Mapping[str, np.ndarray], function: str = "") -> dict[str, float]:
        """Returns the metrics of the scores of all ranks, or of those of one function.

        numbers: of all rows; the first row of an episode has its score.
        """
        call = next(call for call in self.job.workload.workflow.placed_calls if call.function == SCORES)
        name, num = call.outputs[0], self.job.workload.rollout_batch
        name = f"{name.removesuffix('s')}_{function}" if function else name
        scores = numbers.get(name, np.full(num, np.nan)).reshape(num, -1)[:, :: self.job.workload.episode_rows]
        return score_metrics(self.job, self.sources, scores, f"{function}/" if function else "")

    def _metrics(self, measured: Mapping[str, float], answers: Sequence[Mapping]) -> dict[str, float | str]:
        """Returns the metrics of one evaluation. measured: those of the scores."""
        metrics: dict[str, float | str] = dict(measured)
        if not metrics:
            raise UserError(f"an evaluation has no prompt all of whose episodes count: {ALL_BROKE}")
        logged, weights = combine(answers)
        if TIMEOUTS in logged:
            logged[TIMEOUTS] = float(round(logged[TIMEOUTS] * weights[TIMEOUTS]))
        metrics |= {name: value for name, value in logged.items() if name != "score" and not name.endswith("_sq")}
        metrics["tokens_sha256"] = tokens_sha256(answer["rows"] for answer in answers)
        return metrics


def score_metrics(job: Job, sources: Sequence[str], scores: np.ndarray, before: str = "") -> dict[str, float]:
    """Returns the metrics of scores, with pass@k where it is asked for or says something; none without a prompt.

    sources: of the prompts.
    scores: of all ranks, [prompts, samples]. Prompts without one, such as those whose episodes are dropped, count
        nowhere.
    before: what is before the names of metrics: `FUNCTION/`, or nothing for the score of the run.
    """
    is_known = ~np.isnan(scores)
    (kept,) = np.nonzero(is_known.any(1))
    if not len(kept):
        return {}
    right_at = float(np.float32(job.config.eval.right_at))  # scores are float32
    metrics = measure_by_source(scores[kept].tolist(), [sources[prompt] for prompt in kept.tolist()], right_at)
    if not wants_passes(job.config, before) and not np.isin(scores[is_known], (0.0, 1.0)).all():
        metrics = without_passes(metrics)
    if len(kept) > 1:
        metrics[STANDARD_ERROR] = float(np.nanmean(scores[kept], 1).std(ddof=1)) / math.sqrt(len(kept))
    return {f"{before}{name}": value for name, value in metrics.items()}


def wants_passes(config: Config, before: str = "") -> bool:
    """Returns whether pass@k is asked for, whatever the scores are. before: as in score_metrics."""
    return config.eval.right_at != 1.0 or config.checkpoint.best.startswith(f"{before}{PASS}")


class Evaluator:
    """The evaluations of one run. All ranks call the same methods after the same iterations."""

    def __init__(self, prepared: Prepared, training: InstructionLoop, folder: RunFolder, num_done: int):
        """Prepares the evaluations of a run.

        training: the loop of its iterations.
        num_done: iterations that an earlier part of this run has done.
        """
        job = prepared.job
        self.options, self.last = job.config.eval, job.config.iterations
        self.best = job.config.checkpoint.best
        self.less = job.config.algorithm.is_better_lower(self.best)
        self.is_wanted, self.job = prepared.evaluation is not None, prepared.evaluation or job
        self.training, self.folder = training, folder
        self.rows: list[dict[str, Any]] = []  # of evaluations.jsonl
        if not self.is_wanted:
            return
        with self.job.world.together("reading the evaluations so far"):
            rows = folder.rows(EVALUATIONS) if num_done and folder.writes else []
            if not all(isinstance(row.get("iteration"), int) for row in rows):
                raise UserError(
                    f"{folder.shown / EVALUATIONS} has a line without an iteration; restore the file, or delete it"
                )
            rows = [row for row in rows if row["iteration"] <= num_done]
            self._check(rows)
        self.rows = self.job.world.bcast(rows, what="the evaluations so far")
        folder.write_evaluations(self.rows)
        self.evaluation = Evaluation(self.job)
        training.begin()
        self.rollouts = Rollouts(self.job, folder.path, "evaluation")

    def _check(self, rows: Sequence[Mapping]) -> None:
        """Raises UserError if rows of evaluations lack the metric that decides which model is the best."""
        if self.best and not all(self.best in row for row in rows):
            raise UserError(
                f"checkpoint.best={self.best}: evaluations of {self.folder.shown} have no such number; they have "
                f"{', '.join(self._names(rows[-1]))} (pass@k only where all scores are 0 or 1)"
            )

    def is_due(self, num_done: int) -> bool:
        """Returns whether an evaluation after so many iterations is due and not done yet."""
        is_due = num_done % self.options.every == 0 or num_done == self.last
        is_due = is_due and (num_done > 0 or self.options.at_start)
        return self.is_wanted and is_due and num_done not in {row["iteration"] for row in self.rows}

    def evaluate(self, num_done: int) -> str:
        """Evaluates after so many iterations, if that is due and not done yet -> a line for the console, else empty.
        Collective."""
        if not self.is_due(num_done):
            return ""
        metrics, data = self.evaluation.run(num_done)
        self.training.begin()
        self.rollouts.write(data)
        self.rows = [*self.rows, {"iteration": num_done} | metrics]
        self._check(self.rows)
        self.folder.write_evaluations(self.rows)
        return self._line(num_done, self.rows[-1])

    @property
    def best_iteration(self) -> int | None:
        """After how many iterations the best evaluation was made; None without checkpoint.best."""
        if not (self.best and self.rows):
            return None
        iteration: int = self.rows[best_row(self.rows, self.best, less=self.less)]["iteration"]
        return iteration

    @property
    def why_over(self) -> str:
        """Why the run ends before its last iteration; empty if it goes on."""
        if not (self.options.patience and self.rows):
            return ""
        index = best_row(self.rows, self.best, less=self.less)
        num, best = len(self.rows) - 1 - index, self.rows[index]
        if num < self.options.patience:
            return ""
        return (
            f"ended early, because {self.best} has not improved in {num} evaluations; it was "
            f"{best[self.best]:.4g} after {_iterations(best['iteration'])}"
        )

    def ends(self) -> dict[str, tuple[float, float]]:
        """Returns the first and the last value of each metric over all prompts."""
        names = [name for name in self._names(self.rows[-1]) if name in self.rows[0]] if self.rows else []
        return {name: (self.rows[0][name], self.rows[-1][name]) for name in names}

    def _names(self, row: Mapping) -> list[str]:
        """Returns the metrics of an evaluation that are shown."""
        known: Sequence[str] = headlines_of(self.job.config.algorithm.metrics)
        if self.job.workload.workflow.generate_calls:
            known = metric_names(self.options.samples_per_prompt, function_labels(self.job.config))
        return [name for name in known if name in row]

    def _line(self, num_done: int, metrics: Mapping) -> str:
        """Returns a line for the console."""
        shown = self._names(metrics)
        means = [name for name in shown if name.endswith(shown[0])]
        of_sources = [name for name in metrics if name.startswith(tuple(f"{mean}/" for mean in means))]
        values = titled({name: metrics[name] for name in (*shown, *of_sources)})
        text = ", ".join(f"{name} {formatted(value)}" for name, value in values.items())
        num = self.job.workload.rollout_batch
        when = f"after {_iterations(num_done)}" if num_done else "before training"
        rows = "prompts" if self.evaluation.scores else "rows"
        line = f"evaluation {when}: {text}; {num} {rows}, {metrics['evaluation_s']:.1f} s"
        is_long = any("/" in name for name in shown)  # of several functions
        return textwrap.fill(line, 80, subsequent_indent="  ", break_on_hyphens=False) if is_long else line


def _iterations(num: int) -> str:
    return "1 iteration" if num == 1 else f"{num} iterations"


def evaluate_once(config: Config, program: Program, world: World, num_done: int, out: Path | None) -> dict[str, Any]:
    """Runs an evaluation program once and returns its metrics. Collective; raises UserError.

    num_done: the random numbers are those of a run's evaluation after so many iterations.
    out: folder to write all responses to, as a run does; None: none.
    """
    prepared = prepare(replace(evaluated(config), mini_batch_tokens=0), program, world)
    job = prepared.job
    notes = [f"warning: {note}" for note in prepared.notes]
    notes += [f"note: {config.eval.prompts}: {text}" for text in job.prompts.lost]
    for note in notes if world.rank == 0 else ():
        print(note, flush=True)
    evaluation = Evaluation(replace(job, stream=random_streams.EVALUATION))
    metrics, data = evaluation.run(num_done)
    if out is not None:
        Rollouts(evaluation.job, out, "evaluation").write(data)
    job.close()
    return {"prompts": program.workload.rollout_batch, **metrics}
