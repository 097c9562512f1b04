"""The loop of a run: one iteration after another. train.py writes, shows, evaluates and saves each.

An iteration executes the program on new data, sums up what all ranks counted, and updates the algorithm's state from
these global numbers alone, so that it stays the same on every rank. One iteration ahead, an iteration trains one batch
and samples the next one.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_spmd.runtime.checkpoint import in_flight
from rlhf_spmd.runtime.checkpoint.checkpoint_files import Checkpoint
from rlhf_spmd.runtime.checkpoint.saving import Tensors
from rlhf_spmd.runtime.execute.executor import Executor, next_state
from rlhf_spmd.runtime.execute.iteration import Iteration
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.execute.rounds import settle
from rlhf_spmd.runtime.run.metrics import check_finite, speed, summarize
from rlhf_spmd.runtime.run.prepare import make_iteration


@dataclass(frozen=True, slots=True)
class Done:
    """A finished iteration.

    number: from 0.
    metrics: global, the same on every rank.
    answers: the messages of all ranks.
    signals: that some rank has received meanwhile.
    is_drained: all ranks have met after it. If not, only rank 0 has it, and nothing collective may be done.
    """

    number: int
    data: Iteration
    metrics: dict[str, Any]
    answers: Sequence[Mapping[str, Any]]
    signals: frozenset[str]
    is_drained: bool = True


class Loop:
    """The iterations of a run on this rank. history: the metrics of those so far, to which each further one adds."""

    def __init__(self, job: Job, executor: Executor, history: list[dict[str, Any]], device_flops: float | None = None):
        self.job, self.executor, self.history = job, executor, history
        self.device_flops = device_flops  # FLOP/s of large products on each device; None: they are unknown or differ
        self.is_ahead = bool(job.program.placement.ahead)
        self.state = job.state.of_algorithm  # of the algorithm, after the iterations of the history
        self.last: Done | None = None  # the last iteration of this start
        self.now: Iteration | None = None  # the current one
        self.in_flight: Iteration | None = None  # the next one, if it is or has been drawn ahead
        self.began_s = time.perf_counter()  # when it did

    def iterations(self) -> Iterator[Done]:
        """Runs the remaining iterations, and yields each one. Collective."""
        job = self.job
        while (number := len(self.history)) < job.config.iterations:
            self.began_s = time.perf_counter()
            self.now = data = self.begin(number)
            now, before = (self.in_flight, data) if self.is_ahead else (data, None)
            answers = self.executor.iteration(now, before)
            settle(job, now)
            done = self.over(data, answers, time.perf_counter() - self.began_s)
            job.state.of_algorithm = self.state
            yield done

    def over(self, data: Iteration, answers: Sequence[Mapping[str, Any]], seconds: float) -> Done:
        """Sums up an iteration, and computes the algorithm's state after it."""
        job = self.job
        metrics = summarize(job, answers, self.state)
        metrics |= speed(job, data, answers, seconds, self.device_flops)
        check_finite(metrics, data.title)
        self.state = next_state(job, self.state, answers)
        self.history.append(metrics)
        signals = frozenset(name for answer in answers for name in answer["signals"])
        self.last = Done(data.number, data, metrics, answers, signals)
        return self.last

    def begin(self, number: int) -> Iteration:
        """Returns the data of an iteration. Ahead they have been sampled, by the prologue if need be, and the next ones
        become those in flight, if there is a next iteration."""
        if not self.is_ahead:
            return make_iteration(self.job, number, self.now)
        data = self.in_flight
        if data is None:
            self.in_flight = data = make_iteration(self.job, number)
            self.executor.iteration(data)
            settle(self.job, data)
            self.executor.recorder.forget(number + 1)  # what follows is the first whole iteration
        data.before = self.history[-1] if self.history else {}
        is_last = number + 1 == self.job.config.iterations
        self.in_flight = None if is_last else replace(make_iteration(self.job, number + 1, data), lag=1)
        return data

    @property
    def draws(self) -> Iteration | None:
        """The iteration whose responses are being sampled."""
        return self.in_flight if self.is_ahead else self.now

    def resume(self, checkpoint: Checkpoint) -> str:
        """Restores the batch in flight of a checkpoint. Returns a note if it should have one and has none.

        Collective.
        """
        if not self.is_ahead:
            return ""
        data = make_iteration(self.job, len(self.history))
        if in_flight.restore(self.job, checkpoint, data):
            self.in_flight = data
        elif len(self.history) < self.job.config.iterations:
            return "note: this run had ended: its next iteration is sampled with the newest weights, not older ones"
        return ""

    def share_in_flight(self) -> Tensors | None:
        """Returns this rank's part of the checkpoint's batch in flight; None: there is none."""
        return None if self.in_flight is None else in_flight.collect(self.job, self.in_flight)
