"""The worker processes of one rank for slow reward functions (`reward_workers`), with a deadline for each response.

A worker (worker.py) gets one row at a time: one that exceeds the deadline is killed and replaced, and only that row has
no score.
"""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.rewards import worker as program
from rlhf_spmd.runtime.rewards.function import shortened
from rlhf_spmd.runtime.rewards.styles import Scored
from rlhf_spmd.runtime.workers.pool import TICK_S, Worker, WorkerPool

MODULE = program.__name__

Scores = tuple[list[float | None], dict[str, list[float | None]]]  # of rows, and further numbers for the log


@dataclass(slots=True, eq=False)
class RowWorker(Worker):
    """One process. task: function and row that it works on, by number; end_s: when their time is over."""

    task: tuple[int, int] | None = None
    end_s: float = math.inf

    @property
    def is_busy(self) -> bool:
        return self.task is not None

    @property
    def until_s(self) -> float:
        return self.end_s


@dataclass(slots=True)
class Round:
    """The rows of one call, what is still to be done for them, and what is known."""

    rows: Scored
    todo: deque[tuple[int, int]]
    num_left: int
    found: list[Scores]
    late: set[int] = field(default_factory=set)


class RewardWorkers(WorkerPool[RowWorker]):
    """Processes that call reward functions. Raises UserError, also from the start, if one cannot load them."""

    def __init__(
        self,
        specs: Sequence[str],
        columns: Sequence[str],
        *,
        num: int,
        timeout_s: float,
        beat: Callable[[], None] = lambda: None,
    ):
        """Starts the workers.

        specs, columns: as in load_reward_function.
        timeout_s: for one response and function; 0: no limit.
        beat: is called again and again while workers work, and not while all of them sleep.
        """
        super().__init__(RowWorker, MODULE, {"functions": list(specs), "columns": list(columns)})
        self.specs, self.timeout_s, self.beat = list(specs), timeout_s or math.inf, beat
        self._now: Round | None = None
        self.start(num)

    def score(self, rows: Scored) -> tuple[list[Scores], set[int]]:
        """Returns the scores of each function, as RewardFunction.score gives them for these rows one by one, and the
        rows that ran out of time, whose scores are None. Raises UserError for errors of the user's code and lost
        workers."""
        if not len(rows):
            return [([], {}) for _ in self.specs], set()
        todo = deque((function, row) for function in range(len(self.specs)) for row in range(len(rows)))
        found: list[Scores] = [([None] * len(rows), {}) for _ in self.specs]
        now = self._now = Round(rows, todo, len(todo), found)
        while now.num_left:
            for worker in self._workers:
                if worker.is_ready and worker.task is None and now.todo:
                    self._hand_out(worker, now)
            self._look(TICK_S)
            for worker in [one for one in self._workers if time.monotonic() >= one.end_s]:
                assert worker.task is not None  # no other has a deadline
                now.late.add(worker.task[1])
                now.num_left -= 1
                self._end(worker, by_force=True)
                self._start()
        self._now = None
        return now.found, now.late

    def _hand_out(self, worker: RowWorker, now: Round) -> None:
        function, row = worker.task = now.todo.popleft()
        one = now.rows.part(row, row + 1)
        message = {
            "function": function,
            "row": row,
            "key": one.key,
            "prompt": one.prompts[0],
            "response": one.responses[0],
            "tokens": list(one.tokens[0]) if one.tokens else [],
            "columns": dict(one.columns[0]) if one.columns else None,
        }
        self._send(worker, message)
        worker.end_s = time.monotonic() + self.timeout_s

    def _take(self, worker: RowWorker, answer: Mapping[str, Any]) -> None:
        now = self._now
        assert now is not None and worker.task is not None, "a score that no row asks for"
        (function, row), worker.task, worker.end_s = worker.task, None, math.inf
        scores, logs = now.found[function]
        scores[row] = answer["score"]
        for name, value in answer["logs"].items():
            logs.setdefault(name, [None] * len(scores))[row] = value
        now.num_left -= 1

    def _not_started(self, error: OSError) -> UserError:
        return UserError(f"no worker for reward functions can be started ({error}): lower reward_workers")

    def _lost(self, worker: RowWorker, how: str, status: int | None) -> None:
        task, names = worker.task, ", ".join(self.specs)
        if task is None or self._now is None:
            when = "before it was given a response" if worker.is_ready else "while it loaded them"
            raise UserError(f"a worker process for the reward functions {names} {how} {when}: fix what they import")
        function, row = task
        fix = "the function, or a library that it calls, ended its process; fix it, or return a score for such a row"
        if status == -signal.SIGKILL:
            fix = "most likely the machine's memory ran out; set reward_workers lower, or fix the function"
        rows = self._now.rows
        raise UserError(
            f"reward function {self.specs[function]}: its worker process {how} on response {row} "
            f"{shortened(rows.responses[row])} (prompt {shortened(rows.prompts[row])}): {fix}"
        )
