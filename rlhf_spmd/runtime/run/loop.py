"""The loop of a run: one iteration after another. Folder, console, evaluations and checkpoints listen to it.

An iteration executes the program on new data, sums up what all ranks counted, and updates the algorithm's state from
these global numbers alone, so that it stays the same on every rank.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.runtime.ahead.steps import AheadExecutor
from rlhf_spmd.runtime.checkpoint.checkpoint_files import Checkpoint
from rlhf_spmd.runtime.checkpoint.saving import Tensors
from rlhf_spmd.runtime.execute.executor import Executor
from rlhf_spmd.runtime.execute.iteration import Iteration
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.run.metrics import check_finite, summarize
from rlhf_spmd.runtime.run.prepare import make_iteration
from rlhf_spmd.runtime.world.metric_sums import combine


@dataclass(frozen=True, slots=True)
class Done:
    """An iteration that is over.

    number: from 0.
    metrics: global, the same on every rank.
    answers: the messages of all ranks.
    signals: that some rank has received meanwhile.
    """

    number: int
    data: Iteration
    metrics: dict[str, Any]
    answers: Sequence[Mapping[str, Any]]
    signals: frozenset[str]


class Loop:
    """The iterations of a run on this rank. history: the metrics of those so far, to which each further one adds."""

    def __init__(self, job: Job, executor: Executor | AheadExecutor, history: list[dict[str, Any]]):
        self.job, self.executor, self.history = job, executor, history
        self.last: Done | None = None  # the last iteration of this start
        self.now: Iteration | None = None  # the current one
        self.doing: Any = None  # what the executor works on: the current one, with a title
        self.began_s = time.perf_counter()  # when it did
        self.listeners: list[Callable[[Done], None]] = []  # called after each iteration, in this order, on every rank

    def run(self, is_over: Callable[[], bool]) -> None:
        """Runs all iterations that are left, and what listens to each. Collective. is_over: asked before each, on every
        rank alike."""
        job = self.job
        while (number := len(self.history)) < job.config.iterations and not is_over():
            self.began_s = time.perf_counter()
            answers = self.executor.iteration(self.given(number))
            data = self.now
            assert data is not None
            metrics = summarize(job, answers)
            metrics["iteration_s"] = time.perf_counter() - self.began_s
            check_finite(metrics, data.title)
            update(job, answers)
            self.history.append(metrics)
            signals = frozenset(name for answer in answers for name in answer["signals"])
            self.last = Done(number, data, metrics, answers, signals)
            for listener in self.listeners:
                listener(self.last)

    def given(self, number: int) -> Any:
        """Returns what the executor works on in an iteration, whose data become `now`."""
        self.now = self.doing = make_iteration(self.job, number)
        return self.now

    @property
    def draws(self) -> Iteration | None:
        """The iteration whose responses are being drawn."""
        return self.now

    def take_up(self, checkpoint: Checkpoint) -> str:
        """Restores what only the loop has in a checkpoint -> a note. Collective."""
        return ""

    def share_in_flight(self) -> Tensors | None:
        """Returns what a checkpoint has on this rank of rows that wait for their iteration; None: there are none."""
        return None


def update(job: Job, answers: Sequence[Mapping[str, Any]]) -> None:
    """Updates the algorithm's state between iterations, from global numbers only."""
    config, state = job.config, job.state
    num_sequences = config.rollout_batch * config.samples_per_prompt
    state.of_algorithm = config.algorithm.after_iteration(
        state.of_algorithm, config.options, *combine(answers), num_sequences
    )
