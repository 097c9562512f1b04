"""When a program's instructions begin and end, given how long each Run and each message takes: its critical path.

The same meaning of the instructions as in deadlock.py and runtime/execute/executor.py: a Run with a group begins when
its last rank arrives and ends everywhere together; a message is on its way as soon as both ends have posted it; a Wait
ends with the last message of this rank's part; Agree ends when the last rank arrives. What shares something slows each
other down: a rank sends, and receives, one message after the other; ranks that share the cores of a node share their
time.
"""

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from rlhf_spmd.plan.program.instructions import Instruction, Load, Message, Post, Program, Run, Wait
from rlhf_spmd.plan.program.pipeline import expand, usual_number


@dataclass(frozen=True, slots=True)
class Forecast:
    """Begin and end of every instruction in seconds, [rank][position] of `program`, in which pipelines are expanded."""

    program: Program
    times: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def makespan_s(self) -> float:
        """Seconds of one iteration."""
        return max((times[-1][1] for times in self.times if times), default=0.0)


@dataclass(frozen=True, slots=True)
class Times:
    """How long things take where nothing else is under way.

    run_s(rank, run): seconds that a Run computes on a rank; where it names a group, the slowest rank counts.
    message_s(message): seconds on the wire. load_s(rank, load): seconds in which weights come from host memory.
    num_workers(node): how many ranks of a node can compute at full speed at the same time; None: all of them.
    alike(rank, run): equal for training steps in stages of which run_s gives the same for each phase.
    """

    run_s: Callable[[int, Run], float]
    message_s: Callable[[Message], float] = lambda message: 0.0
    load_s: Callable[[int, Load], float] = lambda rank, step: 0.0
    num_workers: Callable[[int], float | None] = lambda node: None
    alike: Callable[[int, Run], Hashable] = lambda rank, step: (rank, step)


def simulate(program: Program, times: Times, num_micro_batches: Callable[[Run], int] | None = None) -> Forecast:
    """Simulates one iteration of a program that `check` has no error about.

    num_micro_batches(run): of a Run with stages, whose passes run_s then gets one by one (see Run.phase); None: as many
    as its rows make in full-sized micro-batches.
    """
    program = expand(program, num_micro_batches or (lambda step: usual_number(program, step)))
    simulation = _Simulation(program, times)
    simulation.go_on()
    done = zip(simulation.spans, program.instructions, strict=True)
    assert all(len(spans) == len(steps) for spans, steps in done), "the program hangs; check says where"
    return Forecast(program, tuple(tuple(spans) for spans in simulation.spans))


class _Simulation:
    """Events in the order of their time. A rank goes on until something takes time or it has to wait for others."""

    def __init__(self, program: Program, times: Times):
        self.program, self.times = program, times
        self.spans: list[list[tuple[float, float]]] = [[] for _ in program.instructions]
        self.now, self.numbers = 0.0, count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.ranks = program.cluster.ranks
        self.ready = deque(self.ranks)
        self.began = [0.0 for _ in program.instructions]  # when a rank came to the instruction at which it stands
        self.arrived: dict[Instruction, int] = {}  # what ranks do together -> how many stand at it
        self.known: dict[tuple, list[list[tuple[float, float]]]] = {}  # what pipelines were like that have run
        self.working: dict[tuple[Instruction, int], int] = {}  # a Run, its first rank -> how many still compute
        workers = [times.num_workers(node) for node in range(len(program.cluster.nodes))]
        self.nodes = [None if num is None else _Shared(self, num) for num in workers]
        self.posted: set[tuple[int, int]] = set()  # rank, transfer
        self.left: dict[tuple[int, int], int] = {}  # rank, transfer -> messages that are not under way yet
        self.latest: dict[tuple[int, int], float] = {}  # rank, transfer -> when the last of its messages ends
        self.waiting: set[tuple[int, int]] = set()  # rank, transfer
        self.sends_from, self.receives_from = ([0.0] * program.cluster.num_devices for _ in range(2))

    def go_on(self) -> None:
        """Until nothing happens any more."""
        while self.ready or self.events:
            while self.ready:
                self._arrive(self.ready.popleft())
            if self.events:
                self.now, _, happens = heapq.heappop(self.events)
                happens()

    def at(self, time: float, happens: Callable[[], None]) -> None:
        """Something happens at a time to come."""
        heapq.heappush(self.events, (time, next(self.numbers), happens))

    def _arrive(self, rank: int) -> None:
        """Carries out what this rank can do now."""
        steps = self.program.instructions[rank]
        self.began[rank] = self.now
        while len(self.spans[rank]) < len(steps):
            step = steps[len(self.spans[rank])]
            if isinstance(step, Post):
                self._post(rank, step.transfer)
                self.spans[rank].append((self.now, self.now))
                continue
            if isinstance(step, Wait) and not self.program.moves_weights(step):
                self._wait(rank, step.transfer)
                return
            members = self.program.together(rank, step)
            number = self.arrived.pop(step, 0) + 1 if len(members) > 1 else 1
            if number < len(members):
                self.arrived[step] = number
            else:
                self._begin(step, members)
            return

    def _end(self, members: tuple[int, ...]) -> None:
        """The instruction at which these ranks stand is done."""
        for rank in members:
            self.spans[rank].append((self.began[rank], self.now))
        self.ready.extend(members)

    # ---- what takes its time ----------------------------------------------------------------------------------------

    def _begin(self, step: Instruction, members: tuple[int, ...]) -> None:
        """All who take part in an instruction are there."""
        if not isinstance(step, Run):
            self.at(self.now + self._length_s(step, members), lambda: self._end(members))
            return
        if step.phase == "begin" and not any(self.nodes):
            self._pipeline(step, members)
            return
        self.working[step, members[0]] = len(members)
        for rank in members:
            node = self.nodes[self.program.cluster.node_of(rank)]
            work_s = self.times.run_s(rank, step)
            if node is None or work_s == 0:
                self.at(self.now + work_s, lambda: self._computed(step, members))
            else:
                node.add(work_s, lambda: self._computed(step, members))

    def _pipeline(self, step: Run, members: tuple[int, ...]) -> None:
        """All passes of a training step at once, on devices that nobody shares: the shards' stages begin together, so
        that shards whose passes take equally long are alike."""
        layout = self.program.layout_of(step)
        for dp_index in range(layout.dp):
            shard = [layout.rank_at(dp_index, stage, t) for stage in range(layout.pp) for t in range(layout.tp)]
            for rank, spans in zip(shard, self._passes(shard, step), strict=True):
                self.spans[rank].append((self.began[rank], self.now))
                self.spans[rank] += [(self.now + begin_s, self.now + end_s) for begin_s, end_s in spans]
        for rank in members:
            self.at(self.spans[rank][-1][1], lambda rank=rank: self.ready.append(rank))

    def _passes(self, shard: Sequence[int], step: Run) -> list[list[tuple[float, float]]]:
        """Begin and end of each instruction between the begin of a training step and its update, by rank."""
        node_of = self.program.cluster.node_of
        key = step.call, *((self.times.alike(rank, step), node_of(rank) - node_of(shard[0])) for rank in shard)
        if key not in self.known:
            update, passes = replace(step, phase="update"), {}
            for rank in shard:
                steps, first = self.program.instructions[rank], len(self.spans[rank]) + 1
                passes[rank] = steps[first : steps.index(update, first)]
            alone = replace(self.program, instructions=tuple(passes.get(rank, ()) for rank in self.ranks))
            inner = _Simulation(alone, self.times)
            inner.go_on()
            self.known[key] = [inner.spans[rank] for rank in shard]
        return self.known[key]

    def _computed(self, step: Run, members: tuple[int, ...]) -> None:
        """One more of the ranks of a Run is done; the last one ends it."""
        self.working[step, members[0]] -= 1
        if not self.working[step, members[0]]:
            del self.working[step, members[0]]
            self._end(members)

    def _length_s(self, step: Instruction, members: tuple[int, ...]) -> float:
        if isinstance(step, Wait):  # the hops of a chain are under way at the same time; a rank's own are not
            sent_s, received_s = dict.fromkeys(members, 0.0), dict.fromkeys(members, 0.0)
            for message in self.program.transfers[step.transfer].messages:
                took_s = self.times.message_s(message)
                sent_s[message.source] += took_s
                received_s[message.destination] += took_s
            return max(*sent_s.values(), *received_s.values())
        return self.times.load_s(members[0], step) if isinstance(step, Load) else 0.0

    # ---- messages ---------------------------------------------------------------------------------------------------

    def _post(self, rank: int, transfer: int) -> None:
        """Starts the messages whose other ends have posted, too."""
        self.posted.add((rank, transfer))
        for message in self._part(transfer, rank):
            other = message.destination if message.source == rank else message.source
            if (other, transfer) in self.posted:
                self._send(message, transfer)

    def _send(self, message: Message, transfer: int) -> None:
        source, destination = message.source, message.destination
        begin_s = max(self.now, self.sends_from[source], self.receives_from[destination])
        end_s = begin_s + self.times.message_s(message)
        self.sends_from[source] = self.receives_from[destination] = end_s
        for rank in (source, destination):  # both have posted, so their parts are known
            self.left[rank, transfer] -= 1
            self.latest[rank, transfer] = max(self.latest[rank, transfer], end_s)
            if (rank, transfer) in self.waiting and not self.left[rank, transfer]:
                self.waiting.remove((rank, transfer))
                self.at(self.latest[rank, transfer], lambda rank=rank: self._end((rank,)))

    def _wait(self, rank: int, transfer: int) -> None:
        self._part(transfer, rank)
        if self.left.get((rank, transfer), 0):
            self.waiting.add((rank, transfer))
        else:
            self.at(max(self.now, self.latest.get((rank, transfer), 0.0)), lambda: self._end((rank,)))

    def _part(self, transfer: int, rank: int) -> Sequence[Message]:
        """The messages of a transfer of data that a rank sends or receives."""
        moved = self.program.transfers[transfer]
        if moved.reallocation is not None:
            return ()
        messages = (*moved.sent_by(rank), *moved.received_by(rank))
        if (rank, transfer) not in self.left:
            self.left[rank, transfer], self.latest[rank, transfer] = len(messages), 0.0
        return messages


class _Shared:
    """A node whose ranks share its cores evenly: with n of them at work on c cores, each gets c / n, one at most.

    Work is counted on a clock that runs at that rate, so that a change of n changes no job's end on it.
    """

    def __init__(self, simulation: _Simulation, num_workers: float):
        self.simulation, self.num_workers = simulation, num_workers
        self.clock, self.read_at, self.version = 0.0, 0.0, 0
        self.jobs: list[tuple[float, int, Callable[[], None]]] = []  # clock at the end, number, what then happens

    def add(self, work_s: float, happens: Callable[[], None]) -> None:
        """A rank begins to compute."""
        self._read()
        heapq.heappush(self.jobs, (self.clock + work_s, next(self.simulation.numbers), happens))
        self._schedule()

    def _rate(self) -> float:
        return min(1.0, self.num_workers / len(self.jobs)) if self.jobs else 1.0

    def _read(self) -> None:
        now = self.simulation.now
        self.clock += (now - self.read_at) * self._rate()
        self.read_at = now

    def _schedule(self) -> None:
        """The next end as an event, which counts only while no other job comes or goes."""
        self.version += 1
        if self.jobs:
            left_s = max(self.jobs[0][0] - self.clock, 0.0) / self._rate()
            self.simulation.at(self.simulation.now + left_s, lambda version=self.version: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self.version:
            return
        self._read()
        _, _, happens = heapq.heappop(self.jobs)  # others that end now have events of their own, at the same time
        self._schedule()
        happens()
