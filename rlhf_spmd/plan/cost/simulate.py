"""Simulates a program: when its instructions begin and end, given the seconds of each Run and each message.

Instructions mean the same as in deadlock.py and runtime/execute/executor.py: a Run with a group begins when its last
rank arrives and ends on all ranks together; a message starts once both ends have posted it; a Wait ends with the last
message of this rank's part; Agree ends when the last rank arrives; a Load runs beside the instructions after it. A
rank sends, and receives, one message after the other, those through host memory beside the rest; ranks that share the
cores of a node share their time.

In a chain of iterations (program/chain.py) every rank executes its list again and again, until a list takes all ranks
as long as the one before: that is the iteration which is returned. None of them is drained.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import isclose

from rlhf_spmd.plan.calls import Compute
from rlhf_spmd.plan.program.instructions import Agree, Instruction, Load, Message, Post, Program, Run, Wait
from rlhf_spmd.plan.program.pipeline import expand, usual_number

MOST_STEPS = 8  # of a chain whose times do not repeat; then it has the mean of two


@dataclass(frozen=True, slots=True)
class Forecast:
    """Begin and end of every instruction in seconds, [rank][position] of `program`, in which pipelines are expanded. In
    a chain: of one execution of the lists, since its first rank began it."""

    program: Program
    times: tuple[tuple[tuple[float, float], ...], ...]
    period_s: float | None = None  # in a chain: seconds from one iteration to the next

    @property
    def makespan_s(self) -> float:
        """Seconds of one iteration; in a chain those by which a further one that is not drained makes it longer."""
        if self.period_s is not None:
            return self.period_s
        return max((times[-1][1] for times in self.times if times), default=0.0)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of instructions and messages by themselves.

    run_s(rank, run): of computing a Run on a rank; in a group the slowest rank counts. message_s(message): on the wire.
    load_s(rank, load): of loading weights from host memory. num_workers(node): how many ranks of a node can compute at
    full speed at the same time; None: all of them. alike(rank, run): a key, equal for pipelined training steps that
    have the same run_s in each phase.
    """

    run_s: Callable[[int, Run], float]
    message_s: Callable[[Message], float] = lambda message: 0.0
    load_s: Callable[[int, Load], float] = lambda rank, load: 0.0
    num_workers: Callable[[int], float | None] = lambda node: None
    alike: Callable[[int, Run], Hashable] = lambda rank, run: (rank, run)


def simulate(program: Program, times: Times, num_micro_batches: Callable[[Run], int] | None = None) -> Forecast:
    """Simulates one iteration of a program for which `check` finds no error; in a chain, one amid many.

    num_micro_batches(run): of a Run with stages, for whose passes run_s is called one by one (see Run.phase); None: as
    many as its rows make in full-sized micro-batches.
    """
    program = expand(program, num_micro_batches or (lambda run: usual_number(program, run)))
    simulation = _Simulation(program, times)
    simulation.go_on()
    return simulation.forecast()


class _Simulation:
    """Processes events in the order of time. A rank proceeds until an instruction takes time or waits for others."""

    def __init__(self, program: Program, times: Times):
        self.program, self.times = program, times
        self.spans: list[list[tuple[float, float]]] = [[] for _ in program.instructions]  # of all steps
        delayed = any(isinstance(step, Agree) and step.delay for steps in program.instructions for step in steps)
        self.chained = delayed and not program.placement.ahead  # one ahead, all that is delayed is in each step
        self.num_steps, self.steady_step = (MOST_STEPS if self.chained else 1), 0  # 0: not known yet
        self.ends: list[dict[int, float]] = [{} for _ in range(MOST_STEPS)]  # of each step, of ranks with Runs
        self.busy = {rank for rank in self.program.cluster.ranks if any(map(_is_run, program.instructions[rank]))}
        self.now, self.numbers = 0.0, count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.ranks = program.cluster.ranks
        self.ready = deque(self.ranks)
        self.began = [0.0 for _ in program.instructions]  # when a rank reached its current instruction
        self.arrived: dict[Instruction, int] = {}  # instruction at which ranks meet -> how many have reached it
        self.known: dict[tuple[object, ...], list[list[tuple[float, float]]]] = {}  # cache of _passes
        self.working: dict[tuple[Instruction, int], int] = {}  # a Run, its first rank -> how many still compute
        workers = [times.num_workers(node) for node in range(len(program.cluster.nodes))]
        self.nodes = [None if num is None else _Shared(self, num) for num in workers]
        self.posted: set[tuple[int, int]] = set()  # rank, transfer
        self.left: dict[tuple[int, int], int] = {}  # rank, transfer -> messages that have not started
        self.latest: dict[tuple[int, int], float] = {}  # rank, transfer -> when the last of its messages ends
        self.waiting: set[tuple[int, int]] = set()  # rank, transfer
        self.loaded: dict[tuple[int, str], float] = defaultdict(float)  # rank, model -> when its weights have come
        self.sends_from: dict[tuple[bool, int], float] = defaultdict(float)  # through host, rank -> when it is free
        self.receives_from: dict[tuple[bool, int], float] = defaultdict(float)

    def go_on(self) -> None:
        """Processes all events."""
        while (self.ready or self.events) and not self.steady_step:
            while self.ready:
                self._arrive(self.ready.popleft())
            if self.events:
                self.now, _, happens = heapq.heappop(self.events)
                happens()

    def forecast(self) -> Forecast:
        """Returns the iteration; in a chain the last one that all ranks have ended, and the seconds that it adds."""
        step, over = self.steady_step, 1
        if self.num_steps > 1 and not step:
            step, over = MOST_STEPS - 2, 2  # of the last one it is not known what the next one would do meanwhile
        sizes = [len(instructions) for instructions in self.program.instructions]
        spans = [of_rank[step * size :][:size] for of_rank, size in zip(self.spans, sizes, strict=True)]
        assert [len(of_rank) for of_rank in spans] == sizes, "the program hangs; check says where"
        if not step:
            return Forecast(self.program, tuple(map(tuple, spans)))
        start_s = min(spans[rank][0][0] for rank in self.busy)
        times = (tuple((max(0.0, a - start_s), max(0.0, b - start_s)) for a, b in of_rank) for of_rank in spans)
        end_s, before_s = (max(self.ends[one].values()) for one in (step, step - over))
        return Forecast(self.program, tuple(times), (end_s - before_s) / over)

    def at(self, time: float, happens: Callable[[], None]) -> None:
        """Adds an event at a later time."""
        heapq.heappush(self.events, (time, next(self.numbers), happens))

    def _arrive(self, rank: int) -> None:
        """Executes a rank's instructions until one takes time or waits."""
        instructions = self.program.instructions[rank]
        self.began[rank] = self.now
        while len(self.spans[rank]) < self.num_steps * len(instructions):
            step, place = divmod(len(self.spans[rank]), len(instructions))
            if step and not place and rank in self.busy:
                self._end_step(rank, step - 1)
            instruction = instructions[place]
            iteration = step - instruction.delay * self.chained
            first = iteration * len(self.program.transfers)  # number of the iteration's first transfer
            if isinstance(instruction, Post) and iteration >= 0:
                self._post(rank, first + instruction.transfer)
            ended_s = self.now
            if isinstance(instruction, Load):
                ended_s += self.times.load_s(rank, instruction)
                self.loaded[rank, instruction.model] = ended_s
            late = self.chained and isinstance(instruction, Agree) and instruction.delay
            if isinstance(instruction, Post | Load) or late or iteration < 0:
                self.spans[rank].append((self.now, ended_s))
                continue
            if isinstance(instruction, Wait) and not self.program.moves_weights(instruction):
                self._wait(rank, first + instruction.transfer)
                return
            members = self.program.together(rank, instruction)
            number = self.arrived.pop(instruction, 0) + 1 if len(members) > 1 else 1
            if number < len(members):
                self.arrived[instruction] = number
            else:
                self._begin(instruction, members)
            return

    def _end_step(self, rank: int, step: int) -> None:
        """Notes when a rank has ended a step, and whether all ranks have and it took each as long as the one before."""
        ends = self.ends[step]
        ends[rank] = self.now
        if step > 1 and len(ends) == len(self.busy):  # the first one lacks what is delayed
            lengths = [end_s - self.ends[step - 1][one] for one, end_s in ends.items()]
            self.steady_step = step * isclose(min(lengths), max(lengths))

    def _end(self, members: tuple[int, ...]) -> None:
        """Ends the current instruction of these ranks."""
        for rank in members:
            self.spans[rank].append((self.began[rank], self.now))
        self.ready.extend(members)

    # ---- instructions that take time --------------------------------------------------------------------------------

    def _begin(self, instruction: Instruction, members: tuple[int, ...]) -> None:
        """Begins an instruction that all its ranks have reached."""
        if not isinstance(instruction, Run):
            self.at(self.now + self._length_s(instruction, members), lambda: self._end(members))
            return
        call = self.program.workload.workflow.call(instruction.call)
        loaded_s = 0.0 if isinstance(call, Compute) else max(self.loaded[rank, call.model] for rank in members)
        if loaded_s > self.now:
            self.at(loaded_s, lambda: self._begin(instruction, members))
            return
        if instruction.phase == "begin" and not any(self.nodes):
            self._pipeline(instruction, members)
            return
        self.working[instruction, members[0]] = len(members)
        for rank in members:
            node = self.nodes[self.program.cluster.node_of(rank)]
            work_s = self.times.run_s(rank, instruction)
            if node is None or work_s == 0:
                self.at(self.now + work_s, lambda: self._computed(instruction, members))
            else:
                node.add(work_s, lambda: self._computed(instruction, members))

    def _pipeline(self, run: Run, members: tuple[int, ...]) -> None:
        """Simulates all passes of a training run at once, on devices that no ranks share: since all stages begin
        together, shards whose passes take equally long have the same times."""
        layout = self.program.layout_of(run)
        for dp_index in range(layout.dp):
            shard = [layout.rank_at(dp_index, stage, t) for stage in range(layout.pp) for t in range(layout.tp)]
            for rank, spans in zip(shard, self._passes(shard, run), strict=True):
                self.spans[rank].append((self.began[rank], self.now))
                self.spans[rank] += [(self.now + begin_s, self.now + end_s) for begin_s, end_s in spans]
        for rank in members:
            self.at(self.spans[rank][-1][1], partial(self.ready.append, rank))

    def _passes(self, shard: Sequence[int], run: Run) -> list[list[tuple[float, float]]]:
        """Returns begin and end of each instruction between the "begin" and "update" phases of a training run, by
        rank."""
        node_of = self.program.cluster.node_of
        key = run.call, *((self.times.alike(rank, run), node_of(rank) - node_of(shard[0])) for rank in shard)
        if key not in self.known:
            update, passes = replace(run, phase="update"), {}
            for rank in shard:
                instructions = self.program.instructions[rank]
                first = len(self.spans[rank]) % len(instructions) + 1
                passes[rank] = instructions[first : instructions.index(update, first)]
            alone = replace(self.program, instructions=tuple(passes.get(rank, ()) for rank in self.ranks))
            inner = _Simulation(alone, self.times)
            inner.go_on()
            self.known[key] = [inner.spans[rank] for rank in shard]
        return self.known[key]

    def _computed(self, run: Run, members: tuple[int, ...]) -> None:
        """Notes that one more rank of a Run has computed; the last one ends it."""
        self.working[run, members[0]] -= 1
        if not self.working[run, members[0]]:
            del self.working[run, members[0]]
            self._end(members)

    def _length_s(self, instruction: Instruction, members: tuple[int, ...]) -> float:
        if isinstance(instruction, Wait):  # the hops of a chain run at the same time, but those of one rank in turn
            sent_s, received_s = dict.fromkeys(members, 0.0), dict.fromkeys(members, 0.0)
            for message in self.program.transfers[instruction.transfer].messages:
                took_s = self.times.message_s(message)
                sent_s[message.source] += took_s
                received_s[message.destination] += took_s
            return max(*sent_s.values(), *received_s.values())
        return 0.0

    # ---- messages ---------------------------------------------------------------------------------------------------

    def _post(self, rank: int, transfer: int) -> None:
        """Starts the messages whose other ends have been posted."""
        self.posted.add((rank, transfer))
        for message in self._part(transfer, rank):
            other = message.destination if message.source == rank else message.source
            if (other, transfer) in self.posted:
                self._send(message, transfer)

    def _send(self, message: Message, transfer: int) -> None:
        source, destination = message.source, message.destination
        leaves, arrives = (message.through_host, source), (message.through_host, destination)
        begin_s = max(self.now, self.sends_from[leaves], self.receives_from[arrives])
        end_s = begin_s + self.times.message_s(message)
        self.sends_from[leaves] = self.receives_from[arrives] = end_s
        for rank in (source, destination):  # both have posted, so their parts are known
            self.left[rank, transfer] -= 1
            self.latest[rank, transfer] = max(self.latest[rank, transfer], end_s)
            if (rank, transfer) in self.waiting and not self.left[rank, transfer]:
                self.waiting.remove((rank, transfer))
                self.at(self.latest[rank, transfer], partial(self._end, (rank,)))

    def _wait(self, rank: int, transfer: int) -> None:
        self._part(transfer, rank)
        if self.left.get((rank, transfer), 0):
            self.waiting.add((rank, transfer))
        else:
            self.at(max(self.now, self.latest.get((rank, transfer), 0.0)), lambda: self._end((rank,)))

    def _part(self, transfer: int, rank: int) -> Sequence[Message]:
        """Returns the messages of a transfer of data that a rank sends or receives."""
        moved = self.program.transfers[transfer % len(self.program.transfers)]
        if moved.reallocation is not None:
            return ()
        messages = (*moved.sent_by(rank), *moved.received_by(rank))
        if (rank, transfer) not in self.left:
            self.left[rank, transfer], self.latest[rank, transfer] = len(messages), 0.0
        return messages


def _is_run(instruction: Instruction) -> bool:
    return isinstance(instruction, Run)


class _Shared:
    """A node whose ranks share its cores evenly: n ranks at work on c cores get c / n each, one at most.

    Work is measured on a clock that runs at this rate, so a change of n does not change the ends of jobs on it.
    """

    def __init__(self, simulation: _Simulation, num_workers: float):
        self.simulation, self.num_workers = simulation, num_workers
        self.clock, self.read_at, self.version = 0.0, 0.0, 0
        self.jobs: list[tuple[float, int, Callable[[], None]]] = []  # clock at the end, number, what then happens

    def add(self, work_s: float, happens: Callable[[], None]) -> None:
        """Starts the computation of a rank."""
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
        """Adds the next end of a job as an event, which is void once another job starts or ends."""
        self.version += 1
        if self.jobs:
            left_s = max(self.jobs[0][0] - self.clock, 0.0) / self._rate()
            self.simulation.at(self.simulation.now + left_s, partial(self._finish, self.version))

    def _finish(self, version: int) -> None:
        if version != self.version:
            return
        self._read()
        _, _, happens = heapq.heappop(self.jobs)  # others that end now have events of their own, at the same time
        self._schedule()
        happens()
