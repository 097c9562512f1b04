"""When a program's instructions begin and end, given how long each Run and each message takes: its critical path.

The same meaning of the instructions as in blocking.py and runtime/execute.py: a Run with a group begins when its last
rank arrives and ends everywhere together; a message is on its way as soon as both ends have posted it; a Wait ends with
the last message of this rank's part; Agree ends when the last rank arrives.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rlhf_spmd.plan.pipeline import expand, usual_number
from rlhf_spmd.plan.program import Agree, Load, Message, Offload, Post, Program, Run, Wait


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
    times_of = _Times(run_s, message_s, load_s)
    program = expand(program, num_micro_batches or (lambda step: usual_number(program, step)))
    lists = program.instructions
    times: list[list[tuple[float, float]]] = [[] for _ in lists]
    posted: dict[tuple[int, int], float] = {}  # rank, transfer -> when
    waiting = set(range(len(lists)))
    while waiting:
        advanced = {rank for rank in waiting if _advance(program, rank, times, posted, times_of)}
        waiting = {rank for rank in waiting if len(times[rank]) < len(lists[rank])}
        assert advanced or not waiting, "the program hangs; check says where"
    return Forecast(program, tuple(tuple(spans) for spans in times))


def _advance(program: Program, rank: int, times: list, posted: dict, times_of: _Times) -> bool:
    """Carries out what this rank can without the others; True if that was something."""
    lists, before = program.instructions, len(times[rank])
    while len(times[rank]) < len(lists[rank]):
        step, now = lists[rank][len(times[rank])], _now(times, rank)
        if isinstance(step, Post):
            posted[rank, step.transfer] = now
            times[rank].append((now, now))
        elif isinstance(step, Wait) and program.transfers[step.transfer].reallocation is None:
            arrivals = [_arrival(m, step.transfer, posted, times_of) for m in _part(program, step, rank)]
            if None in arrivals:
                break
            times[rank].append((now, max(now, *arrivals)))
        else:
            members = _members(program, step, rank)
            if any(len(times[r]) == len(lists[r]) or lists[r][len(times[r])] != step for r in members):
                break
            begin = max(_now(times, r) for r in members)
            end = begin + _length_s(program, step, members, times_of)
            for r in members:
                times[r].append((_now(times, r), end))
    return len(times[rank]) > before


def _now(times: list, rank: int) -> float:
    return times[rank][-1][1] if times[rank] else 0.0


def _length_s(program: Program, step: Run | Wait | Agree | Load | Offload, members: tuple, times_of: _Times) -> float:
    """Seconds of an instruction once all who take part in it are there."""
    if isinstance(step, Run):
        return max(times_of.run_s(rank, step) for rank in members)
    if isinstance(step, Wait):  # the hops of a chain are under way at the same time
        return max((times_of.message_s(message) for message in program.transfers[step.transfer].messages), default=0.0)
    return times_of.load_s(members[0], step) if isinstance(step, Load) else 0.0


def _members(program: Program, step: Run | Wait | Agree | Load | Offload, rank: int) -> tuple[int, ...]:
    if isinstance(step, Agree):
        return program.cluster.ranks
    if isinstance(step, Wait):
        return program.transfers[step.transfer].ranks
    if isinstance(step, Load | Offload):
        return (rank,)
    return program.groups[step.group] if step.group is not None else (rank,)


def _part(program: Program, step: Wait, rank: int) -> list[Message]:
    return [m for m in program.transfers[step.transfer].messages if rank in (m.source, m.destination)]


def _arrival(message: Message, transfer: int, posted: dict, times_of: _Times) -> float | None:
    """When a message is through; None while one of its ends is not posted."""
    ends = [posted.get((rank, transfer)) for rank in (message.source, message.destination)]
    return None if None in ends else max(ends) + times_of.message_s(message)
