"""The loop of a run whose iterations follow one another without a meeting (plan/program/chain.py).

Rank 0 sums up an iteration when all ranks have told what they counted in it, which is one or two iterations later. So
metrics and warnings come late, and a signal ends the run one or two iterations after it. What needs all ranks, an
evaluation, a checkpoint or the rows of an iteration in a file, comes after iterations at which the chain is drained.
Then all ranks have the metrics of all iterations, and the same state of the algorithm.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from rlhf_spmd.runtime.execute.executor import Executor, answers_of
from rlhf_spmd.runtime.execute.iteration import Iteration
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.execute.response_hashes import responses_made
from rlhf_spmd.runtime.run.loop import Done, Loop
from rlhf_spmd.runtime.run.prepare import make_iteration
from rlhf_spmd.runtime.world.reports import Reports


class Chain(Loop):
    """The iterations of a run on this rank, of which the next begins before all ranks have ended the one before."""

    def __init__(
        self,
        job: Job,
        executor: Executor,
        history: list[dict[str, Any]],
        device_flops: float | None = None,
        *,
        is_due: Callable[[int], bool],
    ):
        """is_due: whether something that needs all ranks comes after so many iterations."""
        super().__init__(job, executor, history, device_flops)
        assert executor.reports is not None, "the program chains iterations"
        self.reports: Reports = executor.reports
        executor.next_state = self.state
        self.is_due = is_due
        self.unknown: deque[tuple[Iteration, float]] = deque()  # on rank 0: not summed up yet, with their seconds
        self.num_shared = len(history)  # iterations whose metrics all ranks have
        self.signals: frozenset[str] = frozenset()  # of iterations since the chain was drained

    def iterations(self) -> Iterator[Done]:
        """Runs the iterations that are left. Yields each one on rank 0, on others those after which all have met.
        Collective where they have."""
        job, before = self.job, None
        for number in range(len(self.history), job.config.iterations):
            self.began_s = time.perf_counter()
            self.now = data = make_iteration(job, number)
            if job.world.rank == 0:
                self.reports.tell(self.executor.asked.any or bool(self.signals) or self.is_due(number + 1))
            self.executor.iteration(data, before)
            before, job.state.of_algorithm = data, self.executor.next_state
            data.responses = responses_made(job.program, job.world.rank, data)
            job.world.progress(f"waiting for: {data.title} on rank 0", number)  # begins as all waits do
            if not self.reports.told():
                data.store.clear()
                if job.world.rank == 0:
                    self.unknown.append((data, time.perf_counter() - self.began_s))
                yield from self._known()
                continue
            answers = self.executor.iteration(None, data)
            seconds, before = time.perf_counter() - self.began_s, None
            yield from self._known(wait=True)
            done = self._drained(data, answers, seconds)
            yield done

    def _known(self, *, wait: bool = False) -> Iterator[Done]:
        """Sums up on rank 0 the iterations that all ranks have told of; with `wait` all."""
        while self.unknown:
            data, seconds = self.unknown[0]
            reports = self.reports.all_of(data.number) if wait else self.reports.arrived(data.number)
            if reports is None:
                return
            self.unknown.popleft()
            done = self.over(data, answers_of(reports), seconds)
            self.signals |= done.signals
            yield replace(done, is_drained=False, signals=frozenset())  # all ranks get them together

    def _drained(self, data: Iteration, answers: list[dict[str, Any]], seconds: float) -> Done:
        """Sums up the iteration after which all ranks have met, and shares what rank 0 knows of those before it."""
        world, read = self.job.world, self.job.config.algorithm.read_state
        self.reports.finish()
        known = self.history[self.num_shared :]  # on other ranks nothing
        state = None if self.state is None else asdict(self.state)
        known, signals, state = world.bcast([known, sorted(self.signals), state], what="metrics of a chain")
        if world.rank > 0:
            self.history += known
            self.state = read(state) if state is not None else None
        done = self.over(data, answers, seconds)
        self.job.state.of_algorithm = self.executor.next_state = self.state
        self.num_shared, self.signals = data.number + 1, frozenset()
        return replace(done, signals=done.signals | frozenset(signals))
