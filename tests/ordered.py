"""Simulates the execution of instructions with communicators that work in order, as those of NCCL. Nothing is computed:
ranks and communicators advance in random order until all have ended or none can continue.

It is more detailed than the proof (plan/proof/deadlock.py): bodies of Runs with stages are in place, for numbers of
micro-batches and tokens that differ from Run to Run; the chains of a reallocation go bucket by bucket; stages have a
communicator for each slice; and messages of a pair must leave and arrive in one order, since NCCL knows no tags.
"""

import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from rlhf_spmd.plan.layout import STAGES, group_name
from rlhf_spmd.plan.program.instructions import WORLD, Agree, Post, Program, Run, Transfer, Wait
from rlhf_spmd.plan.program.pipeline import expand, numbers

BUCKET_NUMBERS, MOST_BUCKETS = 100, 4  # small ones, as the models are
CONTROL = "MPI"  # the communicator of the Agree, for each set of ranks


@dataclass(frozen=True, slots=True)
class Message:
    source: int
    destination: int
    what: tuple


@dataclass(slots=True, eq=False)
class Operation:
    """What a rank gives to a communicator at once: messages that travel side by side, or a collective."""

    communicator: str
    messages: tuple[Message, ...] = ()
    meets: tuple[object, tuple[int, ...]] | None = None  # a collective, and its ranks
    needs: dict[object, tuple[int, ...]] = field(default_factory=dict)  # message or collective -> ranks that must begin
    begun: bool = False
    over: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    key: tuple
    operation: Operation


@dataclass(frozen=True, slots=True)
class Finish:
    key: tuple
    text: str


def expanded(program: Program, rng: random.Random) -> Program:
    """Returns the program with bodies of random sizes in the place of its Runs with stages."""
    chosen: dict[Run, int] = {}

    def choose(step: Run) -> int:
        call = program.workload.workflow.call(step.call)
        if step not in chosen:
            chosen[step] = rng.choice(numbers(program.layout_of(step), program.workload, call))
        return chosen[step]

    return expand(program, choose, choose)


def actions(program: Program, rank: int) -> Iterator[Start | Finish]:
    """Yields what a rank of an expanded program does, as far as others have to do with it."""
    for position, step in enumerate(program.instructions[rank]):
        if isinstance(step, Run) and step.group is not None:
            yield from _collective(step.group, step, program.groups.get(step.group, (rank,)), position)
        elif isinstance(step, Agree):
            yield from _collective(f"{CONTROL} {step.ranks}", step, program.together(rank, step), position)
        elif isinstance(step, Post | Wait):
            transfer = program.transfers[step.transfer]
            if transfer.reallocation is not None:
                yield from _chains(transfer, step, rank)
                continue
            if isinstance(step, Wait):
                yield Finish((step.transfer,), str(step))
                continue
            messages = [Message(m.source, m.destination, (step.transfer, i)) for i, m in enumerate(transfer.messages)]
            mine = tuple(m for m in messages if rank in (m.source, m.destination))
            yield Start((step.transfer,), Operation(_communicator(program, transfer, rank), mine))


def _collective(group: str, step: Run | Agree, ranks: tuple[int, ...], position: int) -> Iterator[Start | Finish]:
    yield Start((position, "meets"), Operation(group, meets=(step, tuple(ranks))))
    yield Finish((position, "meets"), str(step))


def _communicator(program: Program, transfer: Transfer, rank: int) -> str:
    if transfer.call is None:
        return transfer.communicator
    return group_name(program.placement.layouts[transfer.call].stage_ranks(rank), STAGES)


def _chains(transfer: Transfer, step: Post | Wait, rank: int) -> Iterator[Start | Finish]:
    """Yields the steps of runtime/weights/weight_mover.py, one after the other; at step t the link h of a chain carries
    bucket t - h."""
    plan = transfer.reallocation
    routes = [(number, route) for number, route in enumerate(plan.routes) if rank in route.ranks]
    sizes = {number: min(-(-route.num_numbers // BUCKET_NUMBERS), MOST_BUCKETS) for number, route in routes}

    def of_step(turn: int) -> tuple[Message, ...]:
        found = []
        for number, route in routes:
            place = route.ranks.index(rank)
            for link in (place - 1, place):  # from the one before, to the next one
                bucket = turn - link
                if 0 <= link < len(route.ranks) - 1 and 0 <= bucket < sizes[number]:
                    found.append(Message(*route.ranks[link : link + 2], (step.transfer, number, link, bucket)))
        return tuple(found)

    if isinstance(step, Post):
        yield Start((step.transfer, 0), Operation(WORLD, of_step(0)))
        return
    last = max((sizes[number] + len(route.ranks) for number, route in routes), default=0)
    for turn in range(last):
        yield Finish((step.transfer, turn), f"{step}, step {turn}")
        yield Start((step.transfer, turn + 1), Operation(WORLD, of_step(turn + 1)))


class Machine:
    """Carries out the actions of all ranks.

    apart: whether messages inside calls have communicators of their own. connected: whether all pairs have been
    connected; else a first message blocks the host of a rank until its peer's host comes to it, too.
    """

    def __init__(self, program: Program, rng: random.Random, *, connected: bool = True, apart: bool = True):
        self.program, self.rng, self.connected, self.apart = program, rng, connected, apart
        self.queues: dict[tuple[int, str], deque[Operation]] = {}  # of a rank and communicator; the first is under way
        self.begun: dict[object, set[int]] = {}  # message or collective -> ranks that have begun it
        self.order: dict[tuple, list[Message]] = {}  # communicator, pair, end -> messages as that end began them
        self.num_met: Counter = Counter()  # rank and communicator -> collectives so far
        self.at_first: dict[tuple, set[int]] = {}  # communicator and pair -> hosts at its first message

    def run(self) -> dict[int, str]:
        """Runs all lists. Returns the places of the ranks that never end."""
        ranks = list(self.program.cluster.ranks)
        left = {rank: deque(actions(self.program, rank)) for rank in ranks}
        started: dict[tuple, Operation] = {}
        happened = True
        while happened:
            happened = False
            self.rng.shuffle(ranks)
            for rank in ranks:
                for _ in range(min(self.rng.choice((1, 1, 2, 5, 100)), len(left[rank]))):
                    action = left[rank][0]
                    if isinstance(action, Finish):
                        if (rank, *action.key) not in started or not started[rank, *action.key].over:
                            break
                    elif not self._start(rank, action.operation):
                        break
                    else:
                        started[rank, *action.key] = action.operation
                    left[rank].popleft()
                    happened = True
            happened = self._carry_out() or happened
        return {rank: str(left[rank][0]) for rank in sorted(ranks) if left[rank]}

    def _start(self, rank: int, operation: Operation) -> bool:
        """Puts an operation into its queue; False while the host can't."""
        name = operation.communicator if self.apart or operation.meets is not None else WORLD
        if operation.meets is not None:
            step, members = operation.meets
            operation.needs[name, self.num_met[rank, name], step] = members
            self.num_met[rank, name] += 1
        pairs = [(name, *sorted((m.source, m.destination))) for m in operation.messages]
        for pair in pairs:
            self.at_first.setdefault(pair, set()).add(rank)
        if not self.connected and any(len(self.at_first[pair]) < 2 for pair in pairs):
            return False
        operation.needs.update({(name, m): (m.source, m.destination) for m in operation.messages})
        self.queues.setdefault((rank, name), deque()).append(operation)
        return True

    def _carry_out(self) -> bool:
        """Begins what is first in each queue, which is over if all that it needs has begun, in random order."""
        happened, keys = False, [key for key, queue in self.queues.items() if queue]
        self.rng.shuffle(keys)
        for rank, name in keys:
            operation = self.queues[rank, name][0]
            if not operation.begun:
                operation.begun = True
                for what in operation.needs:
                    self.begun.setdefault(what, set()).add(rank)
                for m in operation.messages:
                    end = "source" if rank == m.source else "destination"
                    self.order.setdefault((name, m.source, m.destination, end), []).append(m)
            if all(self.begun[what].issuperset(members) for what, members in operation.needs.items()):
                self.queues[rank, name].popleft()
                operation.over = happened = True
        return happened

    def crossed(self) -> list[tuple]:
        """Returns pairs whose messages did not leave and arrive in one order."""
        pairs = {key[:3] for key in self.order}
        return [pair for pair in pairs if self.order.get((*pair, "source")) != self.order.get((*pair, "destination"))]


def standing(program: Program, rng: random.Random, **options) -> dict[int, str]:
    """Returns where ranks are left standing in one random schedule of a program without bodies in it; {} if all lists
    end.

    options: of the Machine.
    """
    machine = Machine(expanded(program, rng), rng, **options)
    found = machine.run()
    assert found or not machine.crossed(), machine.crossed()
    return found
