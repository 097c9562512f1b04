"""The worker processes of one rank for slow reward functions (`reward_workers`), with a deadline for each response.

Each worker (worker.py) is a new program and no fork, since a process that has started MPI must not fork; it
loads the functions by their names, so nothing is pickled. A worker gets one row at a time: a worker that exceeds the
deadline is killed and replaced, and only that row has no score. All of this happens in the thread that asks for
scores, because a worker ends with the thread that started it (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import atexit
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.guard import user_code
from rlhf_spmd.runtime.guard.descendants import below
from rlhf_spmd.runtime.guard.launcher import without_launcher
from rlhf_spmd.runtime.guard.supervise import process_fields
from rlhf_spmd.runtime.rewards.function import shortened
from rlhf_spmd.runtime.rewards.styles import Scored
from rlhf_spmd.runtime.rewards.worker import LEFT_TO_THE_RANK

MODULE = "rlhf_spmd.runtime.rewards.worker"
TICK_S = 0.2  # between two looks at workers that say nothing
END_S = 2.0  # for an idle worker to end by itself, and for a killed one to be gone
NO_DEVICES = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")

Scores = tuple[list[float | None], dict[str, list[float | None]]]  # of rows, and further numbers for the log


@dataclass(slots=True, eq=False)
class Worker:
    """One process. task: function and row that it works on, by number; until_s: when their time is over."""

    process: subprocess.Popen
    connection: socket.socket
    is_ready: bool = False
    task: tuple[int, int] | None = None
    until_s: float = math.inf
    received: bytes = b""
    used_s: float = 0.0  # processor time at the last look


@dataclass(slots=True)
class Round:
    """The rows of one call, what is still to be done for them, and what is known."""

    rows: Scored
    todo: deque[tuple[int, int]]
    num_left: int
    found: list[Scores]
    late: set[int] = field(default_factory=set)


class RewardWorkers:
    """Processes that call reward functions. Raises UserError, also from `start`, if one cannot load them."""

    def __init__(
        self,
        specs: Sequence[str],
        columns: Sequence[str],
        *,
        num: int,
        timeout_s: float,
        beat: Callable[[], None] = lambda: None,
    ):
        """specs, columns: as of load_reward_function. timeout_s: for one response and function; 0: no limit. beat: is
        called again and again while workers work, and not while all of them sleep."""
        self.specs, self.columns, self.timeout_s, self.beat = list(specs), list(columns), timeout_s or math.inf, beat
        self.notes: list[str] = []  # of the functions
        self._selector = selectors.DefaultSelector()
        self._workers: list[Worker] = []
        atexit.register(self.close)
        for _ in range(num):
            self._start()
        while not all(worker.is_ready for worker in self._workers):
            self._look(None)

    def score(self, rows: Scored) -> tuple[list[Scores], set[int]]:
        """The scores of each function, as RewardFunction.score gives them for these rows one by one, and the rows that
        ran out of time, whose scores are None. Raises UserError for errors of the user's code and lost workers."""
        if not len(rows):
            return [([], {}) for _ in self.specs], set()
        todo = deque((function, row) for function in range(len(self.specs)) for row in range(len(rows)))
        found: list[Scores] = [([None] * len(rows), {}) for _ in self.specs]
        now = Round(rows, todo, len(todo), found)
        while now.num_left:
            for worker in self._workers:
                if worker.is_ready and worker.task is None and now.todo:
                    self._hand_out(worker, now)
            self._look(now)
            for worker in [one for one in self._workers if time.monotonic() >= one.until_s]:
                assert worker.task is not None  # no other has a deadline
                now.late.add(worker.task[1])
                now.num_left -= 1
                self._end(worker, by_force=True)
                self._start()
        return now.found, now.late

    def close(self) -> None:
        """Ends all workers."""
        for worker in self._workers:
            worker.connection.close()  # before any is waited for: idle ones end by themselves, all at once
        while self._workers:
            self._end(self._workers[0], by_force=self._workers[0].task is not None)
        atexit.unregister(self.close)

    # ---- processes --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        environment = without_launcher(os.environ) | NO_DEVICES
        # Signals of the launcher wait until the worker has handlers for them; a child inherits what is blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_THE_RANK)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,  # so that it is killed together with what it started
            )
        except OSError as error:
            raise UserError(f"no worker for reward functions can be started ({error}): lower reward_workers") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        worker = Worker(process, ours)
        self._workers.append(worker)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        self._send(worker, {"functions": self.specs, "columns": self.columns}, None)

    def _end(self, worker: Worker, *, by_force: bool) -> int | None:
        """Removes a worker, and ends it -> its status, -n after signal n; None if it does not end."""
        self._workers.remove(worker)
        with suppress(KeyError, ValueError):
            self._selector.unregister(worker.connection)
        worker.connection.close()
        if not by_force:
            _has_ended(worker.process)
        family = below(worker.process.pid)  # what it started, too, in sessions of its own
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        for process in family:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(END_S)
        return worker.process.returncode

    # ---- messages ---------------------------------------------------------------------------------------------------

    def _hand_out(self, worker: Worker, now: Round) -> None:
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
        self._send(worker, message, now)
        worker.until_s = time.monotonic() + self.timeout_s

    def _send(self, worker: Worker, message: Mapping[str, Any], now: Round | None) -> None:
        try:
            worker.connection.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            raise self._lost(worker, now) from None

    def _look(self, now: Round | None) -> None:
        """Waits for answers until the next deadline, for TICK_S at most, and takes them."""
        wait_s = min(TICK_S, *(worker.until_s - time.monotonic() for worker in self._workers))
        events = self._selector.select(max(0.0, wait_s))
        for key, _ in events:
            worker: Worker = key.data
            try:
                data = worker.connection.recv(2**16)
            except ConnectionResetError:
                data = b""
            if not data:
                raise self._lost(worker, now)
            worker.received += data
            while b"\n" in worker.received:
                line, _, worker.received = worker.received.partition(b"\n")
                self._take(worker, json.loads(line), now)
        busy = [worker for worker in self._workers if worker.task or not worker.is_ready]
        if events or self._has_worked(busy) or any(worker.until_s < math.inf for worker in busy):
            self.beat()

    def _take(self, worker: Worker, answer: Mapping[str, Any], now: Round | None) -> None:
        for text in answer["notes"]:
            user_code.notes.heard(text)
        if "error" in answer:
            raise UserError(answer["error"])
        if "ready" in answer:
            worker.is_ready, self.notes = True, answer["ready"]
            return
        assert now is not None and worker.task is not None, "a score that no row asks for"
        (function, row), worker.task, worker.until_s = worker.task, None, math.inf
        scores, logs = now.found[function]
        scores[row] = answer["score"]
        for name, value in answer["logs"].items():
            logs.setdefault(name, [None] * len(scores))[row] = value
        now.num_left -= 1

    def _has_worked(self, workers: Sequence[Worker]) -> bool:
        """Whether any of these workers used its processor since the last look."""
        has_worked = False
        for worker in workers:
            fields = process_fields(worker.process.pid)
            used_s = fields[1] if fields else worker.used_s
            has_worked = has_worked or used_s > worker.used_s
            worker.used_s = used_s
        return has_worked

    def _lost(self, worker: Worker, now: Round | None) -> UserError:
        """The message about a worker that ended without an answer."""
        task, names = worker.task, ", ".join(self.specs)
        has_ended = _has_ended(worker.process)  # a moment after it has closed its connection
        status = self._end(worker, by_force=True)
        how = f"exited with status {status}" if has_ended else "closed its connection to the rank"
        if has_ended and status is not None and status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
        if task is None or now is None:
            when = "before it was given a response" if worker.is_ready else "while it loaded them"
            return UserError(f"a worker process for the reward functions {names} {how} {when}: fix what they import")
        function, row = task
        fix = "the function, or a library that it calls, ended its process; fix it, or return a score for such a row"
        if has_ended and status == -signal.SIGKILL:
            fix = "most likely the machine's memory ran out; set reward_workers lower, or fix the function"
        return UserError(
            f"reward function {self.specs[function]}: its worker process {how} on response {row} "
            f"{shortened(now.rows.responses[row])} (prompt {shortened(now.rows.prompts[row])}): {fix}"
        )


def _has_ended(process: subprocess.Popen) -> bool:
    """Whether a process ends within END_S. Its status stays to be read, so that its number is not given away."""
    until_s = time.monotonic() + END_S
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > until_s:
            return False
        time.sleep(0.005)
    return True
