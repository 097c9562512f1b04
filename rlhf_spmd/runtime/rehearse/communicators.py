"""Communicators that carry out their operations strictly in the order in which a rank posts them, as NCCL's do, over
one MPI communicator, in which each has tags of its own.

An operation is a batch of messages, which travel side by side, or a meeting of all ranks of a group. The first one of
each communicator's queue is under way; the next one begins when it is over. A message says how long it takes: it begins
when both ends are under way, and a rank sends, and receives, one after the other (plan/cost/simulate.py). Nothing here
blocks in MPI, whose waits spin: every wait is a test and a sleep. Times are of the monotonic clock, which all processes
of a machine share.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhf_spmd.errors import UserError

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 2e-4, 0.05  # between two tests
PAUSE_SHARE = 0.02  # of the time in which nothing has happened: more tests would make a rank that waits look active
QUIET_PAUSE_S = 0.5  # while no operation is under way
NUM_TAGS = 4  # of a communicator: of messages, of their answers, of meetings, of those answers
DATA, TAKEN, ARRIVED, MET = range(NUM_TAGS)
HEADER = 2  # numbers before those of a message: its name, and when its sender is free


@dataclass(slots=True)
class Part:
    """One end of a message.

    name: a number that tells it from all others of an iteration.
    numbers: what it carries; or, where it arrives, how many numbers it will carry.
    wire: what it shares with other messages of this rank.
    """

    name: int
    peer: int
    sends: bool
    seconds: float
    numbers: np.ndarray
    wire: str = ""
    what: str = ""  # for messages
    is_lost: bool = False
    request: Any = None
    answer: Any = None
    buffer: np.ndarray = field(default_factory=lambda: np.empty(0))
    end_s: float | None = None


@dataclass(slots=True, eq=False)
class Operation:
    """What a rank gives to a communicator at once.

    members: of a meeting, ascending.
    seconds: that it takes this rank once all have come.
    """

    parts: Sequence[Part] = ()
    name: int = 0
    members: tuple[int, ...] = ()
    seconds: float = 0.0
    has_begun: bool = False
    is_over: bool = False
    requests: list[tuple[Any, np.ndarray]] = field(default_factory=list)
    end_s: float | None = None  # when it will be over; None: others have not come


class Communicators:
    """The communicators of one rank. names: of all of them, the same on every rank."""

    def __init__(self, comm: Any, names: Iterable[str], beat: Callable[[], None]):
        """comm: an MPI communicator that nothing else uses. beat: tells that this rank is active."""
        self.comm, self.rank, self.beat = comm, comm.rank, beat
        self.tags = {name: number * NUM_TAGS for number, name in enumerate(names)}
        self.queues: dict[str, deque[Operation]] = {name: deque() for name in self.tags}
        self.active: set[str] = set()  # communicators whose queue is not empty
        self.free_s: dict[tuple[str, bool], float] = {}  # wire and direction -> when this rank may use it again
        self.sent: list[tuple[Any, np.ndarray]] = []  # requests whose buffers must live until they are done

    def start(self, name: str, operation: Operation) -> Operation:
        """Queues an operation, and begins it if it is the first."""
        self.queues[name].append(operation)
        self.active.add(name)
        self.advance()
        return operation

    def finish(self, operation: Operation) -> None:
        """Returns once an operation is over."""
        self._until(lambda: operation.is_over, is_active=lambda: operation.end_s is not None)

    def work(self, until_s: float) -> None:
        """Sleeps until a time, as a rank that computes: the communicators go on, and the rank counts as active."""
        self._until(lambda: time.monotonic() >= until_s, until_s, is_active=lambda: True)

    def _until(
        self, is_over: Callable[[], bool], until_s: float | None = None, *, is_active: Callable[[], bool]
    ) -> None:
        last_s = time.monotonic()
        while True:
            if self.advance():
                last_s = time.monotonic()
            pause_s = min(max(PAUSE_SHARE * (time.monotonic() - last_s), SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
            if is_over():
                return
            sleep_s = pause_s if self.active or until_s is None else QUIET_PAUSE_S
            if is_active():
                self.beat()
            if until_s is not None:
                sleep_s = min(sleep_s, max(until_s - time.monotonic(), 0.0))
            time.sleep(sleep_s)

    def advance(self) -> bool:
        """Does what can be done now -> whether an operation has ended."""
        has_ended = False
        for name in tuple(self.active):
            queue, tag = self.queues[name], self.tags[name]
            while queue:
                first = queue[0]
                if not first.has_begun:
                    self._begin(first, tag)
                if not self._is_over(first, tag):
                    break
                first.is_over = has_ended = True
                queue.popleft()
            if not queue:
                self.active.discard(name)
        self.sent = [one for one in self.sent if not one[0].Test()]
        return has_ended

    # ---- messages ---------------------------------------------------------------------------------------------------

    def _begin(self, operation: Operation, tag: int) -> None:
        operation.has_begun = True
        for part in operation.parts:
            part.buffer = np.empty(HEADER + len(part.numbers))
            if not part.sends:
                part.request = self.comm.Irecv(part.buffer, part.peer, tag + DATA)
                continue
            wire = part.wire, True
            begin_s = max(time.monotonic(), self.free_s.get(wire, 0.0))
            part.buffer[:HEADER] = part.name, begin_s
            part.buffer[HEADER:] = part.numbers
            self.free_s[wire] = begin_s + part.seconds
            if not part.is_lost:
                self.sent.append((self.comm.Isend(part.buffer, part.peer, tag + DATA), part.buffer))
            part.answer = np.empty(1)
            part.request = self.comm.Irecv(part.answer, part.peer, tag + TAKEN)
        if operation.members:
            self._arrive(operation, tag)

    def _is_over(self, operation: Operation, tag: int) -> bool:
        ends = [self._end_of(part, tag) for part in operation.parts]
        if operation.members:
            ends.append(self._end_of_meeting(operation, tag))
        known = [end_s for end_s in ends if end_s is not None]
        if len(known) < len(ends):
            return False
        operation.end_s = max(known, default=0.0)
        return operation.end_s <= time.monotonic()

    def _end_of(self, part: Part, tag: int) -> float | None:
        """Returns when a message has been transferred; None: it is not known yet. The receiver decides."""
        if part.end_s is not None or not part.request.Test():
            return part.end_s
        wire = part.wire, part.sends
        if part.sends:
            part.end_s = float(part.answer[0])
        else:
            name, begin_s = part.buffer[:HEADER]
            if int(name) != part.name:
                raise UserError(f"rank {self.rank} received another message than {part.what} from rank {part.peer}")
            part.end_s = max(time.monotonic(), float(begin_s), self.free_s.get(wire, 0.0)) + part.seconds
            part.numbers, answer = part.buffer[HEADER:], np.array([part.end_s])
            self.sent.append((self.comm.Isend(answer, part.peer, tag + TAKEN), answer))
        self.free_s[wire] = max(self.free_s.get(wire, 0.0), part.end_s)
        return part.end_s

    # ---- meetings ---------------------------------------------------------------------------------------------------

    def _arrive(self, operation: Operation, tag: int) -> None:
        """Tells the lowest rank when each other one comes, and for how long it then works."""
        mine, first = np.array([operation.name, time.monotonic(), operation.seconds]), operation.members[0]
        operation.requests = [(None, mine)]
        if self.rank == first:
            for other in operation.members[1:]:
                arrived = np.empty(3)
                operation.requests.append((self.comm.Irecv(arrived, other, tag + ARRIVED), arrived))
            return
        self.sent.append((self.comm.Isend(mine, first, tag + ARRIVED), mine))
        end = np.empty(1)
        operation.requests = [(self.comm.Irecv(end, first, tag + MET), end)]

    def _end_of_meeting(self, operation: Operation, tag: int) -> float | None:
        """Returns when the slowest rank is done; None: some have not come, or have come to another meeting, and all
        hang."""
        if operation.end_s is not None or not all(
            request is None or request.Test() for request, _ in operation.requests
        ):
            return operation.end_s
        arrived = [numbers for _, numbers in operation.requests]
        if self.rank != operation.members[0]:
            operation.end_s = float(arrived[0][0])
            return operation.end_s
        operation.requests = [(None, numbers) for numbers in arrived]
        if len({int(name) for name, _, _ in arrived}) > 1:
            return None
        operation.end_s = max(time_s for _, time_s, _ in arrived) + max(seconds for *_, seconds in arrived)
        for other in operation.members[1:]:
            end = np.array([operation.end_s])
            self.sent.append((self.comm.Isend(end, other, tag + MET), end))
        return operation.end_s
