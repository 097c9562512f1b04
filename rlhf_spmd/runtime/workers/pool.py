"""The worker processes of one rank: they start, get lines of JSON, answer with lines of JSON, and end.

Each worker is a new program and no fork, since a process that has started MPI must not fork; it loads the user's code
by its name, so nothing is pickled. All of this happens in the thread that asks for answers, because a worker ends with
the thread that started it (PR_SET_PDEATHSIG).
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
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.failure.launcher import without_launcher
from rlhf_spmd.runtime.failure.processes import below, process_fields
from rlhf_spmd.runtime.workers.serve import LEFT_TO_THE_RANK

TICK_S = 0.2  # between two looks at workers that say nothing
END_S = 2.0  # for an idle worker to end by itself, and for a killed one to be gone
NO_DEVICES = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")


@dataclass(slots=True, eq=False)
class Worker:
    """One process."""

    process: subprocess.Popen
    connection: socket.socket
    is_ready: bool = False
    received: list[bytes] = field(default_factory=list)  # parts of a line
    used_s: float = 0.0  # processor time at the last look

    @property
    def is_busy(self) -> bool:
        """Whether it works on something."""
        raise NotImplementedError

    @property
    def until_s(self) -> float:
        """When the time for what it works on is over; infinity: never."""
        raise NotImplementedError


One = TypeVar("One", bound=Worker)


class WorkerPool(ABC, Generic[One]):
    """Processes that call code of the user. Raises UserError, also from `start`, if one cannot load it."""

    def __init__(self, make: Callable[[subprocess.Popen, socket.socket], One], module: str, opening: Mapping[str, Any]):
        """make: a worker of a process and a connection. module: the program of a worker. opening: the first message to
        each, which loads the user's code."""
        self.beat: Callable[[], None] = lambda: None  # called while workers work, and not while all of them sleep
        self.notes: list[str] = []  # of the user's code
        self._make, self._module, self._opening = make, module, opening
        self._selector = selectors.DefaultSelector()
        self._workers: list[One] = []

    def start(self, num: int) -> None:
        """Starts so many workers, and waits until they are ready."""
        atexit.register(self.close)
        for _ in range(num):
            self._start()
        while not all(worker.is_ready for worker in self._workers):
            self._look(TICK_S)

    def close(self) -> None:
        """Ends all workers."""
        for worker in self._workers:
            worker.connection.close()  # before any is waited for: idle ones end by themselves, all at once
        while self._workers:
            self._end(self._workers[0], by_force=self._workers[0].is_busy)
        atexit.unregister(self.close)

    # ---- what the kinds of workers do -------------------------------------------------------------------------------

    @abstractmethod
    def _take(self, worker: One, answer: Mapping[str, Any]) -> None:
        """Takes an answer to something else than the first message."""

    @abstractmethod
    def _lost(self, worker: One, how: str, status: int | None) -> None:
        """Goes on after a worker ended without an answer, or raises UserError. The worker has been removed. how: it
        ended, as a predicate. status: -n after signal n; None: it has not ended."""

    @abstractmethod
    def _not_started(self, error: OSError) -> UserError:
        """Returns the message for a worker that cannot be started."""

    # ---- processes --------------------------------------------------------------------------------------------------

    def _start(self) -> One:
        ours, theirs = socket.socketpair()
        environment = without_launcher(os.environ) | NO_DEVICES
        # Signals of the launcher wait until the worker has handlers for them; a child inherits what is blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_THE_RANK)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,  # so that it is killed together with what it started
            )
        except OSError as error:
            raise self._not_started(error) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        worker = self._make(process, ours)
        self._workers.append(worker)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        self._send(worker, self._opening)
        return worker

    def _end(self, worker: One, *, by_force: bool) -> int | None:
        """Removes a worker, and ends it -> its status, -n after signal n; None if it does not end."""
        self._workers.remove(worker)
        with suppress(KeyError, ValueError):
            self._selector.unregister(worker.connection)
        worker.connection.close()
        if not by_force:
            has_ended(worker.process)
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

    def _send(self, worker: One, message: Mapping[str, Any]) -> None:
        try:
            worker.connection.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            self._drop(worker)

    def _look(self, wait_s: float) -> None:
        """Waits for answers until the next deadline, for so long at most, and takes them."""
        wait_s = min(wait_s, *(worker.until_s - time.monotonic() for worker in self._workers), math.inf)
        events = self._selector.select(max(0.0, wait_s))
        for key, _ in events:
            worker: One = key.data
            if worker not in self._workers:  # it was ended for what another one said
                continue
            try:
                data = worker.connection.recv(2**20)
            except ConnectionResetError:
                data = b""
            if not data:
                self._drop(worker)
                continue
            first, *others = data.split(b"\n")
            worker.received.append(first)
            for rest in others:
                line, worker.received = b"".join(worker.received), [rest]
                self._heard(worker, json.loads(line))
        busy = [worker for worker in self._workers if worker.is_busy or not worker.is_ready]
        if events or self._has_worked(busy) or any(worker.until_s < math.inf for worker in busy):
            self.beat()

    def _heard(self, worker: One, answer: Mapping[str, Any]) -> None:
        if "error" in answer:
            raise UserError(answer["error"])
        if "ready" in answer:
            worker.is_ready, self.notes = True, answer["ready"]
            return
        self._take(worker, answer)

    def _has_worked(self, workers: Sequence[One]) -> bool:
        """Returns whether any of these workers used its processor since the last look."""
        has_worked = False
        for worker in workers:
            fields = process_fields(worker.process.pid)
            used_s = fields[1] if fields else worker.used_s
            has_worked = has_worked or used_s > worker.used_s
            worker.used_s = used_s
        return has_worked

    def _drop(self, worker: One) -> None:
        """Removes a worker that ended without an answer, and says how."""
        over = has_ended(worker.process)  # a moment after it has closed its connection
        status = self._end(worker, by_force=True)
        how = f"exited with status {status}" if over else "closed its connection to the rank"
        if over and status is not None and status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
        self._lost(worker, how, status if over else None)


def has_ended(process: subprocess.Popen) -> bool:
    """Returns whether a process ends within END_S. Its status stays to be read, so that its number is not given
    away."""
    until_s = time.monotonic() + END_S
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > until_s:
            return False
        time.sleep(0.005)
    return True
