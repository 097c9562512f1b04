"""When a program's instructions begin and end, given how long each Run and each message takes: its critical path.

The same meaning of the instructions as in blocking.py and runtime/execute.py: a Run with a group begins when its last
rank arrives and ends everywhere together; a message is on its way as soon as both ends have posted it; a Wait ends with
the last message of this rank's part; Agree ends when the last rank arrives.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rlhf_spmd.plan.pipeline import expand, usual_number
from rlhf_spmd.plan.program import Agree, Instruction, Load, Message, Offload, Post, Program, Run, Wait


@dataclass(frozen=True, slots=True)
class Forecast:
    """Begin and end of every instruction in seconds, [rank][position] of `program`, in which pipelines are expanded."""

    program: Program
    times: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def makespan_s(self) -> float:
        """Seconds of one iteration."""
        return max((times[-1][1] for times in self.times if times), default=0.0)


class _Times(NamedTuple):
    run_s: Callable[[int, Run], float]
    message_s: Callable[[Message], float]
    load_s: Callable[[int, Load], float]


def simulate(
    program: Program,
    run_s: Callable[[int, Run], float],
    message_s: Callable[[Message], float] = lambda message: 0.0,
    num_micro_batches: Callable[[Run], int] | None = None,
    load_s: Callable[[int, Load], float] = lambda rank, step: 0.0,
) -> Forecast:
    """Simulates one iteration of a program that `check` has no error about.

    run_s(rank, run): seconds that a Run computes on a rank; where it names a group, the slowest rank counts.
    message_s(message): seconds on the wire. Messages do not slow each other down, nor ranks that share a core.
    num_micro_batches(run): of a Run with stages, whose passes run_s then gets one by one (see Run.phase); None: as many
    as its rows make in full-sized micro-batches. load_s(rank, load): seconds in which weights come from host memory.
    """
    program = expand(program, num_micro_batches or (lambda step: usual_number(program, step)))
    simulation = _Simulation(program, _Times(run_s, message_s, load_s))
    ready = deque(program.cluster.ranks)
    while ready:
        ready += simulation.advance(ready.popleft())
    done = zip(simulation.times, program.instructions, strict=True)
    assert all(len(spans) == len(steps) for spans, steps in done), "the program hangs; check says where"
    return Forecast(program, tuple(tuple(spans) for spans in simulation.times))


class _Simulation:
    """Every rank goes on until it has to wait for others, and again when what it waits for has happened."""

    def __init__(self, program: Program, times_of: _Times):
        self.program, self.times_of = program, times_of
        self.times: list[list[tuple[float, float]]] = [[] for _ in program.instructions]
        self.posted: dict[tuple[int, int], float] = {}  # rank, transfer -> when
        self.waiting: dict[tuple[int, int], list[int]] = {}  # what has not been posted -> ranks that wait for it
        self.arrived: dict[Instruction, int] = {}  # what ranks do together -> how many stand at it
        self.parts: dict[int, dict[int, list[Message]]] = {}  # transfer -> rank -> its messages

    def advance(self, rank: int) -> list[int]:
        """Carries out what this rank can -> the ranks that can now go on, too."""
        steps, spans, woken = self.program.instructions[rank], self.times[rank], []
        while len(spans) < len(steps):
            step, now = steps[len(spans)], self._now(rank)
            if isinstance(step, Post):
                self.posted[rank, step.transfer] = now
                spans.append((now, now))
                woken += self.waiting.pop((rank, step.transfer), [])
            elif isinstance(step, Wait) and self.program.transfers[step.transfer].reallocation is None:
                messages = self._part(step.transfer, rank)
                ends = [(end, step.transfer) for m in messages for end in (m.source, m.destination)]
                missing = next((end for end in ends if end not in self.posted), None)
                if missing is not None:
                    self.waiting.setdefault(missing, []).append(rank)
                    break
                spans.append((now, max([now, *(self._arrival(m, step.transfer) for m in messages)])))
            else:
                members = _members(self.program, step, rank)
                number = self.arrived.pop(step, 0) + 1 if len(members) > 1 else 1
                if number < len(members):
                    self.arrived[step] = number
                    break
                self._together(step, members)
                woken += [member for member in members if member != rank]
        return woken

    def _together(self, step: Instruction, members: tuple[int, ...]) -> None:
        end = max(self._now(member) for member in members) + self._length_s(step, members)
        for member in members:
            self.times[member].append((self._now(member), end))

    def _now(self, rank: int) -> float:
        return self.times[rank][-1][1] if self.times[rank] else 0.0

    def _length_s(self, step: Instruction, members: tuple[int, ...]) -> float:
        """Seconds of an instruction once all who take part in it are there."""
        if isinstance(step, Run):
            return max(self.times_of.run_s(rank, step) for rank in members)
        if isinstance(step, Wait):  # the hops of a chain are under way at the same time
            messages = self.program.transfers[step.transfer].messages
            return max((self.times_of.message_s(message) for message in messages), default=0.0)
        return self.times_of.load_s(members[0], step) if isinstance(step, Load) else 0.0

    def _part(self, transfer: int, rank: int) -> list[Message]:
        """The messages of a transfer that a rank sends or receives."""
        if transfer not in self.parts:
            self.parts[transfer] = {}
            for message in self.program.transfers[transfer].messages:
                for end in {message.source, message.destination}:
                    self.parts[transfer].setdefault(end, []).append(message)
        return self.parts[transfer].get(rank, [])

    def _arrival(self, message: Message, transfer: int) -> float:
        """When a posted message is through."""
        posted = max(self.posted[end, transfer] for end in (message.source, message.destination))
        return posted + self.times_of.message_s(message)


def _members(program: Program, step: Instruction, rank: int) -> tuple[int, ...]:
    if isinstance(step, Agree):
        return program.cluster.ranks
    if isinstance(step, Wait):
        return program.transfers[step.transfer].ranks
    if isinstance(step, Load | Offload):
        return (rank,)
    return program.groups[step.group] if step.group is not None else (rank,)
