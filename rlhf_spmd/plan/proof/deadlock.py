"""Finds deadlocks: runs the instruction lists of all ranks against *blocking* semantics.

These are the strictest of any backend. A Run with a group ends only when every rank of the group stands at the same
Run. A Wait ends only when every peer has posted the transfer; for weights, whose buckets travel along chains of ranks,
when all ranks of the transfer stand at the same Wait. Agree needs all ranks. NCCL executes the operations that a rank
gives to a communicator one after another, in the order of the posts, so a transfer that waits for a peer delays the
next. Each rank has three queues: for messages between calls in the world's communicator, for those through host memory,
and for messages between stages. (The latter may have several communicators, and gloo, which
carries messages through host memory, keeps no order: a single ordered queue is a stricter, so safe, model.)

The semantics are monotone: a condition that releases a rank stays true once it is true. Hence all orders of arrival
have the same outcome, and lists that end in one order end in every order; and where transfers need not keep the order
of their posts, a rank waits for less.

For the same reason a Run with stages is proved in two parts. Its body (pipeline.py) is run alone. In the program the
Run is one step, which its ranks take together. If both end, so does the program with each body in place of its Run,
because it ends in the order that runs each body whole once all its ranks stand there. Then every communicator of the
body is empty: those of stages carry nothing but bodies, and the collectives of one step are over before the next step
of their ranks. pipeline.py explains why a body ends for every number of micro-batches or tokens.

The lists of a chain (program/chain.py) are run some times in a row, once more than new weights move in an iteration and
at least three times. Then any number of iterations ends. For ranks that wait for ever wait for each other in a circle.
Whoever waits, waits for ranks that are in its own iteration or still in an earlier one, except senders of new weights,
which wait for ranks in the next iteration. If a circle does so for one model in two iterations, there is a smaller one
in it: on each rank the new weights of the first come before those of the second (check.py proves it), so who waits for
a sender to be through with those of the second waits for those of the first. Hence a smallest circle goes on to a next
iteration at most once for each model.
"""

from collections import defaultdict, deque
from itertools import islice

from rlhf_spmd.plan.layout import format_ranks
from rlhf_spmd.plan.program.chain import in_a_row, unrolled
from rlhf_spmd.plan.program.instructions import Instruction, Post, Program, Transfer, Wait

Hang = tuple[int, int, str]  # rank, position of the instruction in its list, what is wrong with it
Operation = tuple[int, bool]  # a transfer, and whether this is the part of its chains at the Wait


class _Queues:
    """The operations of each rank and communicator that have not ended, in the order in which the rank gave them.

    An operation ends on a rank when it is the first one there and each peer has reached it, too. The chains of a
    reallocation are two operations: the first link of each, which Post starts, and the other links, which all ranks of
    the transfer execute together at the Wait.
    """

    def __init__(self, transfers: tuple[Transfer, ...]):
        self.transfers = transfers
        self.queues: dict[tuple[int, str], deque[Operation]] = defaultdict(deque)
        self.reached: set[tuple[int, Operation]] = set()
        self.ended: set[tuple[int, Operation]] = set()
        self.known: dict[tuple[int, Operation], set[int]] = {}  # cache of peers

    def add(self, rank: int, operation: Operation) -> set[int]:
        """Adds an operation of a rank. Returns the ranks for which something may have changed."""
        communicator = self.transfers[operation[0]].communicator
        self.queues[rank, communicator].append(operation)
        changed, firsts = {rank}, [(rank, self.queues[rank, communicator][0])]
        while firsts:
            rank, first = firsts.pop()
            self.reached.add((rank, first))
            for member in (rank, *self.peers(rank, first)):
                queue = self.queues[member, communicator]
                if queue and queue[0] == first and not self.absent(member, first):
                    self.ended.add((member, queue.popleft()))
                    changed.add(member)
                    if queue:
                        firsts.append((member, queue[0]))
        return changed

    def absent(self, rank: int, operation: Operation) -> bool:
        """Returns whether some peer has not reached an operation."""
        return any((peer, operation) not in self.reached for peer in self.peers(rank, operation))

    def late(self, rank: int, operation: Operation) -> set[int]:
        """Returns the ranks for which an operation, or the one that delays it, still waits; itself if it has not
        begun."""
        if (rank, operation) in self.ended:
            return set()
        queue = self.queues[rank, self.transfers[operation[0]].communicator]
        return (
            {peer for peer in self.peers(rank, queue[0]) if (peer, queue[0]) not in self.reached} if queue else {rank}
        )

    def peers(self, rank: int, operation: Operation) -> set[int]:
        """Returns the ranks that a rank needs for an operation."""
        if (rank, operation) not in self.known:
            number, chained = operation
            transfer = self.transfers[number]
            if chained:
                ranks = set(transfer.ranks)
            elif transfer.reallocation is not None:
                links = (route.ranks[:2] for route in transfer.reallocation.routes)
                ranks = set().union(*(link for link in links if rank in link))
            else:
                ranks = transfer.peers(rank)
            self.known[rank, operation] = ranks - {rank}
        return self.known[rank, operation]


def enough(program: Program) -> int:
    """Returns how many iterations of a chain in a row end only if any number does."""
    return 1 + max(2, sum(transfer.model is not None for transfer in program.transfers))


def hangs(chain: Program, num: int = 0) -> list[Hang]:
    """Runs all lists under blocking semantics; every rank that does not end its list is a finding.

    num: of iterations of a chain in a row; 0: the lists are run as they are.
    """
    program = unrolled(chain, num) if num else chain
    lists = program.instructions
    position, queues = [0] * len(lists), _Queues(program.transfers)
    standing: dict[Instruction, set[int]] = defaultdict(set)  # ranks that have reached an instruction
    met: set[int] = set()  # reallocations whose ranks stand at the Wait
    runnable = set(range(len(lists)))

    def current(rank: int) -> Instruction | None:
        return lists[rank][position[rank]] if position[rank] < len(lists[rank]) else None

    def place(rank: int) -> tuple[int, str]:
        """Returns where a rank stands in its list, and at what."""
        if not num:
            return position[rank], str(current(rank))
        at, iteration, _ = next(islice(in_a_row(chain, rank, num), position[rank], None))
        return at, f"{chain.instructions[rank][at]} of iteration {iteration}"

    def late(rank: int, instruction: Instruction) -> set[int]:
        """Returns the ranks for which an instruction still waits."""
        members = program.together(rank, instruction)
        absent = {member for member in members if current(member) != instruction}
        if absent or not isinstance(instruction, Wait):
            return absent
        chained = program.moves_weights(instruction)
        return set().union(*(queues.late(member, (instruction.transfer, chained)) for member in members))

    while runnable:
        rank = runnable.pop()
        instruction = current(rank)
        if instruction is None:
            continue
        members = program.together(rank, instruction)
        standing[instruction].add(rank)
        if len(standing[instruction]) < len(members):
            continue
        if isinstance(instruction, Wait):
            if program.moves_weights(instruction) and instruction.transfer not in met:
                met.add(instruction.transfer)
                for member in members:
                    runnable |= queues.add(member, (instruction.transfer, True))
            if late(rank, instruction):
                continue
        del standing[instruction]
        for member in members:
            position[member] += 1
            runnable.add(member)
        if isinstance(instruction, Post) and queues.peers(rank, (instruction.transfer, False)):
            runnable |= queues.add(rank, (instruction.transfer, False))
    found = []
    for rank in range(len(lists)):
        instruction = current(rank)
        if instruction is not None:
            others = late(rank, instruction)
            peer = min(others, key=lambda other: (current(other) is not None, other))
            where = "has ended its list"
            if current(peer) is not None:
                where = "stands at instruction {}: {}".format(*place(peer))
            at, text = place(rank)
            ranks = format_ranks(tuple(sorted(others)))
            found.append((rank, at, f"{text} waits for ever for ranks {ranks}; rank {peer} {where}"))
    return found
