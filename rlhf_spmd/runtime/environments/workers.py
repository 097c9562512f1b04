"""The worker processes of one rank for environments: where each episode is, and its calls that are not yet answered.

A worker (worker.py) holds many episodes. One that ends loses them, and they are rebuilt in others by whoever asks. If
several calls ran in it, any of them may have ended it: each of them is then asked while nothing else runs in its
worker, and the one that ends a worker alone is what broke. A call whose time is over goes on in its thread; the worker
gets no new episode while it does, and is replaced once it holds none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.environments import worker as program
from rlhf_spmd.runtime.workers.pool import TICK_S, Worker, WorkerPool

MODULE = program.__name__
GRACE_S = 5.0  # for a worker to say itself that the time of a call is over; then it is ended


@dataclass(frozen=True, slots=True)
class Question:
    """A message about an episode that a worker answers with the ticket.

    timeout_s: 0: no limit.
    """

    ticket: int
    episode: int
    message: Mapping[str, Any]
    timeout_s: float


@dataclass(slots=True, eq=False)
class EpisodeWorker(Worker):
    """One process.

    episodes: those that it holds.
    tickets: of calls without an answer, and when their time is over.
    waiting: questions, as of EnvironmentWorkers.ask, until one has the worker for itself.
    """

    episodes: set[int] = field(default_factory=set)
    tickets: dict[int, float] = field(default_factory=dict)
    waiting: list[Question] = field(default_factory=list)
    is_alone: bool = False  # the call that runs must have it for itself
    hanging: int = 0  # calls that go on although their time is over

    @property
    def is_busy(self) -> bool:
        return bool(self.tickets) or bool(self.hanging)

    @property
    def until_s(self) -> float:
        return min(self.tickets.values(), default=math.inf)


class EnvironmentWorkers(WorkerPool[EpisodeWorker]):
    """Processes that hold environments. Raises UserError, also from the start, if one cannot load them."""

    def __init__(self, spec: str, columns: Sequence[str], *, num: int, beat: Callable[[], None] = lambda: None):
        """Starts the workers.

        spec, columns: as in load_environments.
        beat: see WorkerPool.
        """
        super().__init__(EpisodeWorker, MODULE, {"environment": spec, "columns": list(columns)})
        self.spec, self.beat = spec, beat
        self._place: dict[int, EpisodeWorker] = {}
        self._next = self._num_episodes = 0
        self._asked: dict[int, Question] = {}  # without an answer, by their tickets
        self._suspects: dict[int, Mapping[str, Any]] = {}  # episode -> its message that may have ended a worker
        self._answers: list[tuple[int, Mapping[str, Any]]] = []
        self.start(num)

    def new_episode(self) -> int:
        """Returns a number for an episode."""
        self._num_episodes += 1
        return self._num_episodes

    def holds(self, episode: int) -> bool:
        """Returns whether a worker holds the environment of an episode."""
        return episode in self._place

    def ask(self, episode: int, message: Mapping[str, Any], *, timeout_s: float = 0.0) -> int:
        """Sends a message (worker.py) about an episode -> a number, with which its answer comes. timeout_s: 0: no
        limit."""
        self._next += 1
        worker = self._place.get(episode) or self._placed(episode)
        worker.waiting.append(Question(self._next, episode, message, timeout_s))
        self._send_waiting(worker)
        return self._next

    def drop(self, ticket: int) -> None:
        """Drops the answer to a question, now or when it comes."""
        for worker in [*self._workers]:
            worker.waiting = [one for one in worker.waiting if one.ticket != ticket]
            if worker.tickets.pop(ticket, None) is not None:
                worker.hanging += 1  # until it says how many are
                del self._asked[ticket]
            self._send_waiting(worker)
        self._answers = [one for one in self._answers if one[0] != ticket]

    def leave(self, episode: int) -> None:
        """Closes the environment of an episode, if there is one."""
        worker = self._place.pop(episode, None)
        if worker is None:
            return
        worker.episodes.discard(episode)
        self._send(worker, {"episode": episode, "do": "close"})
        if worker in self._workers and worker.hanging and not worker.episodes:
            self._end(worker, by_force=True)
            self._start()

    def answers(self, wait_s: float, tickets: Container[int]) -> list[tuple[int, Mapping[str, Any]]]:
        """Returns what has come back since: numbers of questions, and answers, of these. Waits for so long at most if
        nothing has. An answer may also be {"gone": True}: its worker has ended, perhaps for what another one did; with
        "unsent" if it was not asked yet."""
        until_s = time.monotonic() + wait_s
        while not any(ticket in tickets for ticket, _ in self._answers):
            left_s = until_s - time.monotonic()
            self._look(max(0.0, min(TICK_S, left_s)))
            for worker in [one for one in self._workers if time.monotonic() >= one.until_s]:
                self._end_blocked(worker)
            if left_s <= 0:
                break
        found = [one for one in self._answers if one[0] in tickets]
        self._answers = [one for one in self._answers if one[0] not in tickets]
        return found

    def _send_waiting(self, worker: EpisodeWorker) -> None:
        """Sends what waits for this worker, in order, up to what must wait until nothing else runs in it."""
        while worker.waiting and worker in self._workers:
            one = worker.waiting[0]
            is_suspect = self._suspects.get(one.episode) == one.message
            if worker.tickets and (is_suspect or worker.is_alone):
                return
            worker.waiting.pop(0)
            worker.is_alone, self._asked[one.ticket] = is_suspect, one
            worker.tickets[one.ticket] = time.monotonic() + one.timeout_s + GRACE_S if one.timeout_s else math.inf
            more = {"ticket": one.ticket, "episode": one.episode, "timeout_s": one.timeout_s}
            self._send(worker, {**one.message, **more})

    def _placed(self, episode: int) -> EpisodeWorker:
        worker = min(self._workers, key=lambda one: (one.hanging, len(one.episodes)))
        worker.episodes.add(episode)
        self._place[episode] = worker
        return worker

    def _end_blocked(self, worker: EpisodeWorker) -> None:
        """Ends a worker that does not even say that the time of a call is over: an async function blocks it."""
        now_s = time.monotonic()
        tickets = {ticket: {"timed_out": True} if now_s >= until_s else {"gone": True} for ticket, until_s in
                   worker.tickets.items()}  # fmt: skip
        self._end(worker, by_force=True)
        self._start()
        self._forget(worker, tickets)

    def _forget(self, worker: EpisodeWorker, tickets: Mapping[int, Mapping[str, Any]]) -> None:
        for episode in worker.episodes:
            self._place.pop(episode, None)
        self._answers += [*tickets.items(), *((one.ticket, {"gone": True, "unsent": True}) for one in worker.waiting)]
        for ticket in worker.tickets:
            del self._asked[ticket]
        worker.tickets.clear()
        worker.waiting.clear()

    def _take(self, worker: EpisodeWorker, answer: Mapping[str, Any]) -> None:
        worker.hanging = answer["hanging"]
        if worker.tickets.pop(answer["ticket"], None) is not None:
            one = self._asked.pop(answer["ticket"])
            if self._suspects.get(one.episode) == one.message:
                del self._suspects[one.episode]
            self._answers.append((answer["ticket"], answer))
        self._send_waiting(worker)

    def _not_started(self, error: OSError) -> UserError:
        return UserError(f"no worker for environments can be started ({error}): lower environment_workers")

    def _lost(self, worker: EpisodeWorker, how: str, status: int | None) -> None:
        if not worker.is_ready:
            raise UserError(
                f"a worker process for environment {self.spec} {how} while it loaded it: fix what it imports"
            )
        answer: dict[str, Any] = {"broken": f"its worker process {how}"}
        asked = [self._asked[ticket] for ticket in worker.tickets]
        if not worker.is_alone and len(asked) + worker.hanging > 1:
            self._suspects |= {one.episode: one.message for one in asked}
            answer = {"gone": True}
        self._start()
        self._forget(worker, dict.fromkeys(worker.tickets, answer))
