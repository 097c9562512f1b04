"""The worker processes of one rank, which call code of the user: they start, are asked, answer, and end.

Each worker is a new program and no fork, since a process that has started MPI must not fork; it loads the user's code
by its name. A question has a key, and the questions of one key go to one worker, which may keep something for it. The
end of a worker is seen by its process, because a child of it may keep its connection open. All of this happens in the
thread that asks, because a worker ends with the thread that started it (PR_SET_PDEATHSIG).
"""

import atexit
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import ModuleType
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.failure.processes import below, process_fields
from rlhf_spmd.runtime.workers.serve import LEFT_TO_THE_RANK, Link, run

TICK_S = 0.2  # between two looks at workers that send nothing
END_S = 2.0  # for an idle worker to end by itself, and for a killed one to be gone
MOST_BYTES = 0x20202020 - 1  # of an answer: text that user code writes into the connection reads as a longer one

Answer = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class Question:
    """A message without an answer.

    is_alone: nothing else may run in its worker.
    until_s: when its time is over.
    """

    ticket: int
    key: int | None
    message: Mapping[str, Any]
    timeout_s: float
    is_alone: bool
    until_s: float = math.inf
    is_dropped: bool = False


@dataclass(slots=True, eq=False)
class Worker:
    """One process.

    keys: that it keeps something for.
    asked: by ticket.
    is_worn: a call may go on in it although nobody waits for its answer.
    """

    process: SpawnProcess
    connection: Connection
    is_ready: bool = False
    keys: set[int] = field(default_factory=set)
    asked: dict[int, Question] = field(default_factory=dict)
    is_worn: bool = False

    @property
    def until_s(self) -> float:
        """When the time of one of its questions is over."""
        return min((question.until_s for question in self.asked.values()), default=math.inf)

    def takes(self, question: Question, most: int) -> bool:
        """Returns whether it may be asked now. most: questions at once."""
        if not self.asked:
            return True
        is_alone = question.is_alone or any(other.is_alone for other in self.asked.values())
        return len(self.asked) < most and not is_alone


class WorkerPool:
    """Processes that answer questions. Raises UserError, also from the start, for an error of the user's code."""

    def __init__(
        self,
        program: Callable[[Link, Mapping[str, Any]], None],
        opening: Mapping[str, Any],
        *,
        num: int,
        name: str,
        option: str,
        at_once: int = 2**30,
        grace_s: float = 0.0,
        beat: Callable[[], None] = lambda: None,
    ):
        """Starts so many workers, and waits until they are ready.

        program, opening: as of serve.run.
        name: of the user's code, for messages.
        option: that says how many workers there are.
        at_once: questions that a worker has.
        grace_s: for a worker to say itself that the time of a question is over; then it is ended.
        beat: called while workers work, and not while all of them sleep.
        """
        self.beat, self._name, self._option = beat, name, option
        self._program, self._opening, self._at_once, self._grace_s = program, opening, at_once, grace_s
        self._workers: list[Worker] = []
        self._waiting: list[Question] = []
        self._answers: list[tuple[int, Answer]] = []
        self._num_asked = self._num_keys = 0
        self._used_s = 0.0  # processor time of busy workers at the last look
        atexit.register(self.close)
        for _ in range(num):
            self._start()
        while not all(worker.is_ready for worker in self._workers):
            self._look(TICK_S)

    def new_key(self) -> int:
        """Returns a key that no question has had."""
        self._num_keys += 1
        return self._num_keys

    def ask(
        self, key: int | None, message: Mapping[str, Any], *, timeout_s: float = 0.0, is_alone: bool = False
    ) -> int:
        """Asks a worker -> the ticket with which its answer comes.

        key: None: any worker will do.
        timeout_s: 0: no limit.
        is_alone: nothing else may run in the worker meanwhile.
        """
        self._num_asked += 1
        self._waiting.append(Question(self._num_asked, key, message, timeout_s or math.inf, is_alone))
        self._send_waiting()
        return self._num_asked

    def answers(self, wait_s: float, tickets: Container[int]) -> list[tuple[int, Answer]]:
        """Returns the answers that have come to some tickets; waits for so long at most if none has.

        An answer may be {"timed_out": True}, or {"lost": how} if its worker has ended, maybe by what another one did.
        """
        until_s = time.monotonic() + wait_s
        while not any(ticket in tickets for ticket, _ in self._answers):
            left_s = until_s - time.monotonic()
            self._look(max(0.0, min(TICK_S, left_s)))
            if left_s <= 0:
                break
        found = [answer for answer in self._answers if answer[0] in tickets]
        self._answers = [answer for answer in self._answers if answer[0] not in tickets]
        return found

    def drop(self, ticket: int) -> None:
        """Drops the answer to a question, now or when it comes."""
        self._waiting = [question for question in self._waiting if question.ticket != ticket]
        self._answers = [answer for answer in self._answers if answer[0] != ticket]
        for worker in self._workers:
            if ticket in worker.asked:
                worker.is_worn = worker.asked[ticket].is_dropped = True

    def release(self, key: int) -> None:
        """Lets the worker of a key, if there is one, forget what it keeps for it."""
        worker = self._worker_of(key)
        if worker is None:
            return
        worker.keys.discard(key)
        if worker.is_worn and not worker.keys:
            self._replace(worker, "was ended with a call that had timed out")
        else:
            self._send(worker, {"key": key, "do": "close"})

    def close(self) -> None:
        """Ends all workers."""
        for worker in self._workers:
            worker.connection.close()  # before any is waited for: idle ones end by themselves, all at once
        while self._workers:
            worker = self._workers[0]
            self._end(worker, by_force=worker.is_worn or bool(worker.asked))
        atexit.unregister(self.close)

    # ---- processes --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=run, args=(theirs, os.getpid(), self._program, self._opening))
        # Signals of the launcher wait until the worker has handlers for them; a child inherits what is blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_THE_RANK)
        main = sys.modules["__main__"]
        try:
            resource_tracker.ensure_running()  # its start unblocks some of them
            signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_THE_RANK)
            sys.modules["__main__"] = ModuleType("__main__")  # else a worker runs the program of the rank first
            process.start()
        except OSError as error:
            fix = f"lower {self._option}"
            raise UserError(f"no worker for {self._name} can be started ({error}): {fix}") from None
        finally:
            sys.modules["__main__"] = main
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._workers.append(Worker(process, ours))

    def _end(self, worker: Worker, *, by_force: bool) -> None:
        """Removes a worker, and ends it with all that it started."""
        self._workers.remove(worker)
        worker.connection.close()
        process = worker.process
        if not by_force:
            process.join(END_S)
        assert process.pid is not None, "it has been started"
        family = below(process.pid)  # what it started, too, in sessions of its own
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        for child in [process.pid, *family] if process.exitcode is None else family:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        process.join(END_S)

    def _replace(self, worker: Worker, how: str) -> None:
        """Starts another worker in place of one, whose questions are lost, or have timed out."""
        self._end(worker, by_force=True)
        now_s = time.monotonic()
        for question in worker.asked.values():
            answer: Answer = {"timed_out": True} if now_s >= question.until_s else {"lost": how}
            if not question.is_dropped:
                self._answers.append((question.ticket, answer))
        self._start()

    def _lost(self, worker: Worker, status: int | None) -> None:
        """Goes on after a worker ended, or broke its connection. status: -n after signal n; None: it has not ended."""
        how = "broke its connection to the rank, or sent another message than an answer"
        if status is not None:
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        if not worker.is_ready:
            self._end(worker, by_force=True)
            raise UserError(f"a worker process for {self._name} {how} while it loaded it: fix what it imports")
        self._replace(worker, how)

    # ---- messages ---------------------------------------------------------------------------------------------------

    def _send_waiting(self) -> None:
        """Asks what waits, in order: behind a question that its worker does not take yet, none goes to this worker."""
        free = [worker for worker in self._workers if worker.is_ready]
        for question in [*self._waiting]:
            if not free:
                return
            worker = self._worker_of(question.key) or min(
                free, key=lambda each: (each.is_worn, len(each.keys), len(each.asked))
            )
            if worker in free and worker.takes(question, self._at_once):
                self._waiting.remove(question)
                self._ask(worker, question)
            elif worker in free:
                free.remove(worker)

    def _worker_of(self, key: int | None) -> Worker | None:
        """Returns the worker that keeps something for a key, if there is one."""
        return next((worker for worker in self._workers if key in worker.keys), None)

    def _ask(self, worker: Worker, question: Question) -> None:
        message = {**question.message, "key": question.key, "ticket": question.ticket}
        if question.key is not None:
            worker.keys.add(question.key)
        worker.asked[question.ticket] = question
        question.until_s = time.monotonic() + question.timeout_s + self._grace_s
        self._send(worker, message)

    def _send(self, worker: Worker, message: Mapping[str, Any]) -> None:
        with suppress(OSError):  # it has ended, which the next look sees
            worker.connection.send_bytes(json.dumps(message).encode())

    def _look(self, wait_s: float) -> None:
        """Waits for answers until the next deadline, for so long at most, and takes them."""
        wait_s = min([wait_s, *(worker.until_s - time.monotonic() for worker in self._workers)])
        is_quiet = not wait([worker.connection for worker in self._workers], max(0.0, wait_s))
        for worker in [*self._workers]:
            status = worker.process.exitcode  # before its last answers are read
            self._read(worker)
            if worker in self._workers and status is not None:
                self._lost(worker, status)
        for worker in [*self._workers]:
            if time.monotonic() >= worker.until_s:
                self._replace(worker, "was ended with a call that had timed out")
        self._send_waiting()
        busy = [worker for worker in self._workers if worker.asked or worker.is_worn or not worker.is_ready]
        before_s, self._used_s = self._used_s, sum(_used_s(worker.process) for worker in busy)
        if self._used_s > before_s or not is_quiet or any(worker.until_s < math.inf for worker in busy):
            self.beat()

    def _read(self, worker: Worker) -> None:
        """Takes the answers that a worker has sent."""
        while worker in self._workers and worker.connection.poll():
            try:
                answer = json.loads(worker.connection.recv_bytes(MOST_BYTES))
                self._take(worker, answer)
            except (EOFError, OSError, ValueError, TypeError, KeyError):
                worker.process.join(END_S)
                self._lost(worker, worker.process.exitcode)

    def _take(self, worker: Worker, answer: dict[str, Any]) -> None:
        """Takes an answer. Raises UserError for an error of the user's code, KeyError for another message."""
        if "error" in answer:
            raise UserError(answer["error"])
        if "ready" in answer:
            worker.is_ready = True
            return
        question = worker.asked.pop(answer.pop("ticket"))
        worker.is_worn = worker.is_worn or "timed_out" in answer
        if not question.is_dropped:
            self._answers.append((question.ticket, answer))


def _used_s(process: SpawnProcess) -> float:
    """Returns the processor time of a process; 0 if it has ended."""
    fields = process_fields(process.pid or 0)
    return fields[1] if fields else 0.0
