"""Finds deadlocks: runs the instruction lists of all ranks against *blocking* semantics.

These are the strictest of any backend. A Run with a group ends only when every rank of the group stands at the same
Run. A Wait ends only when every peer has posted the transfer; for weights, whose buckets travel along chains of ranks,
when all ranks of the transfer stand at the same Wait. Agree needs all ranks. NCCL executes the operations that a rank
gives to a communicator one after another, in the order of the posts, so a transfer that waits for a peer delays the
next. Each rank has three queues: for messages between calls in the world's communicator, for those through host memory,
and for messages between stages. (The latter may have several communicators; one queue for all is stricter. gloo, which
carries what goes through host memory, keeps no order; to keep one is stricter.)

The semantics are monotone: a condition that releases a rank stays true once it is true. Hence all orders of arrival
have the same outcome, and lists that end in one order end in every order.

For the same reason a Run with stages is proved in two parts. Its body (pipeline.py) is run alone. In the program the
Run is one step, which its ranks take together. If both end, so does the program with each body in place of its Run,
because it ends in the order that runs each body whole once all its ranks stand there. Then every communicator of the
body is empty: those of stages carry nothing but bodies, and the collectives of one step are over before the next step
of their ranks. pipeline.py says why a body ends for every number of micro-batches or tokens.
"""

from collections import deque
from collections.abc import Callable, Sequence

from rlhf_spmd.plan.layout import HOST, format_ranks
from rlhf_spmd.plan.program.instructions import WORLD, Instruction, Post, Program, Wait

Hang = tuple[int, int, str]  # rank, position of the instruction in its list, what is wrong with it


def misorders(program: Program) -> list[Hang]:
    """Returns a problem for ranks that do not post the transfers between calls in one global order for each
    communicator."""
    return [hang for communicator in (WORLD, HOST) for hang in _misorders(program, communicator)]


def _misorders(program: Program, communicator: str) -> list[Hang]:
    """Checks one communicator. If there is one order, removing transfers that come first on all their ranks removes
    everything."""
    queues: list[deque[tuple[int, int]]] = [deque() for _ in program.instructions]  # position, transfer
    for queue, instructions in zip(queues, program.instructions, strict=True):
        for position, instruction in enumerate(instructions):
            if isinstance(instruction, Post) and program.transfers[instruction.transfer].communicator == communicator:
                queue.append((position, instruction.transfer))
    ranks_of = [transfer.ranks for transfer in program.transfers]

    def head(rank: int) -> int | None:
        return queues[rank][0][1] if queues[rank] else None

    changed = set(range(len(queues)))
    while changed:
        number = head(changed.pop())
        if number is not None and all(head(rank) == number for rank in ranks_of[number]):
            for rank in ranks_of[number]:
                queues[rank].popleft()
            changed.update(ranks_of[number])
    misordered = []
    for rank, (position, number) in ((rank, queue[0]) for rank, queue in enumerate(queues) if queue):
        peer, other = next((peer, head(peer)) for peer in ranks_of[number] if head(peer) != number)
        text = f"posts transfer {number} here, while rank {peer} posts transfer {other} first: the orders do not fit"
        misordered.append((rank, position, text))
    return misordered


def hangs(program: Program) -> list[Hang]:
    """Returns the deadlocks under in-order semantics, the strictest of any backend; if possible as the simpler problems
    that cause them: orders of posts that do not fit, and deadlocks on any backend.
    """
    in_order = deadlocks(program, in_order=True)
    return in_order and ([*misorders(program), *deadlocks(program)] or in_order)


class _Transfers:
    """What ranks have posted. in_order: a rank executes the transfers of each communicator one after another.

    The chains of a reallocation are two operations: the first link of each, which Post starts, and the other links,
    which all ranks of the transfer execute together at the Wait. A rank begins the second when it stands at the Wait.
    """

    def __init__(self, program: Program, in_order: bool):
        self.transfers, self.in_order = program.transfers, in_order
        self.posted: list[set[int]] = [set() for _ in program.instructions]
        self._known: dict[tuple[int, Operation], set[int]] = {}  # (rank, operation) -> peers
        self._links: dict[int, dict[int, set[int]]] = {}  # transfer of weights -> rank -> peers in the first links
        self._places: dict[tuple[int, Operation], int] = {}  # (rank, operation) -> place in its queue
        self._queues: dict[tuple[int, str], list[Operation]] = {}  # of a rank and communicator
        self._heads: dict[tuple[int, str], int] = {}
        self._come: set[tuple[int, Operation]] = set()  # (rank, operation) that the rank has reached or finished
        self._left: dict[tuple[int, Operation], int] = {}  # (rank, operation) -> peers that have not reached it
        self._absent: dict[Operation, int] = {}  # chains -> ranks that have not reached them

    def post(self, rank: int, number: int) -> set[int]:
        """Returns the ranks for which something may have changed."""
        self.posted[rank].add(number)
        if not self.in_order or not self._peers(rank, (number, False)):
            return {rank}
        return self._queued(rank, (number, False))

    def chain(self, number: int) -> set[int]:
        """Notes that all ranks of a reallocation are at its Wait. Returns the ranks for which something may have
        changed."""
        chains = (number, True)
        ranks = [rank for rank in self.transfers[number].ranks if (rank, chains) not in self._places]
        return set().union(*(self._queued(rank, chains) for rank in ranks))

    def before_chain(self, number: int) -> set[int]:
        """Returns, once all ranks of a reallocation are at its Wait, the ranks on which earlier operations still
        wait."""
        if not self._absent.get((number, True), 1):
            return set()
        late = [rank for rank in self.transfers[number].ranks if self._head(rank, WORLD) != (number, True)]
        return set().union(*(self.missing(rank, number, chained=True) for rank in late))

    def _queued(self, rank: int, operation: "Operation") -> set[int]:
        queue = rank, self.transfers[operation[0]].communicator
        mine = self._queues.setdefault(queue, [])
        self._places.setdefault((rank, operation), len(mine))
        mine.append(operation)
        changed, arrived = {rank}, [(rank, operation)] if self._head(*queue) == operation else []
        while arrived:  # ranks that have reached an operation
            one, operation = arrived.pop()
            again = (one, operation) in self._come  # posted twice
            self._come.add((one, operation))
            for candidate in self._released(one, operation, again=again):
                queue = candidate, self.transfers[operation[0]].communicator
                if self._head(*queue) == operation:
                    self._heads[queue] = self._heads.get(queue, 0) + 1
                    changed.add(candidate)
                    if (after := self._head(*queue)) is not None:
                        arrived.append((candidate, after))
        return changed

    def _released(self, rank: int, operation: "Operation", *, again: bool) -> Sequence[int]:
        """Returns the ranks of an operation whose peers have all reached it, now that this one has (again)."""
        number, chained = operation
        if chained:  # each is a peer of all others, so all are released by the last one
            ranks = self.transfers[number].ranks
            self._absent[operation] = self._absent.get(operation, len(ranks)) - (not again)
            return () if self._absent[operation] else ranks
        peers = self._peers(rank, operation)
        for peer in peers if not again else ():
            left = self._left.get((peer, operation), len(self._peers(peer, operation)))
            self._left[peer, operation] = left - 1
        candidates = (rank, *peers)
        return [one for one in candidates if not self._left.get((one, operation), len(self._peers(one, operation)))]

    def missing(self, rank: int, number: int, *, chained: bool = False) -> set[int]:
        """Returns the ranks for which a posted transfer still waits."""
        operation = number, chained
        if not self.in_order:
            return {peer for peer in self._peers(rank, operation) if number not in self.posted[peer]}
        queue = rank, self.transfers[number].communicator
        place = self._places.get((rank, operation))
        first = self._head(*queue)  # the operation that delays it, or itself
        if place is not None and place < self._heads.get(queue, 0):
            return set()
        if first is None:
            return {rank}  # it waits for a transfer that it has not posted
        return {peer for peer in self._peers(rank, first) if (peer, first) not in self._come}

    def _head(self, rank: int, communicator: str) -> "Operation | None":
        queue, head = self._queues.get((rank, communicator), ()), self._heads.get((rank, communicator), 0)
        return queue[head] if head < len(queue) else None

    def _peers(self, rank: int, operation: "Operation") -> set[int]:
        """Returns the ranks that a rank needs for an operation."""
        number, chained = operation
        transfer = self.transfers[number]
        if (rank, operation) not in self._known:
            if chained or not self.in_order and transfer.reallocation is not None:
                peers = set(transfer.ranks) - {rank}
            elif transfer.reallocation is not None:
                peers = self._first_links(number).get(rank, set())
            else:
                peers = transfer.peers(rank)
            self._known[rank, operation] = peers
        return self._known[rank, operation]

    def _first_links(self, number: int) -> dict[int, set[int]]:
        if number not in self._links:
            links = self._links[number] = {}
            moved = self.transfers[number].reallocation
            for route in moved.routes if moved else ():
                first, second = route.ranks[:2]
                links.setdefault(first, set()).add(second)
                links.setdefault(second, set()).add(first)
        return self._links[number]


Current = Callable[[int], Instruction | None]  # the instruction at which a rank stands
Operation = tuple[int, bool]  # a transfer, and whether this is the part of its chains at the Wait


def deadlocks(program: Program, *, in_order: bool = False) -> list[Hang]:
    """Runs all lists under blocking semantics; every rank that does not end its list is a finding. in_order: transfers
    are executed one after another, in the order of the posts."""
    lists = program.instructions
    position = [0] * len(lists)
    transfers = _Transfers(program, in_order)

    def current(rank: int) -> Instruction | None:
        return lists[rank][position[rank]] if position[rank] < len(lists[rank]) else None

    runnable = set(range(len(lists)))
    standing: dict[Instruction, set[int]] = {}  # instruction at which ranks meet -> ranks that have reached it
    waiters: dict[int, set[int]] = {}  # rank -> ranks that it may release
    while runnable:
        rank = runnable.pop()
        instruction = current(rank)
        if instruction is None:
            continue
        together = program.together(rank, instruction)
        if len(together) > 1:
            here = standing.setdefault(instruction, set())
            here.add(rank)
            if len(here) < len(together):
                continue
        if in_order and isinstance(instruction, Wait) and program.moves_weights(instruction):
            changed = transfers.chain(instruction.transfer)
            runnable |= set().union(*(waiters.pop(one, ()) for one in changed))
        late = _late(program, rank, instruction, current, transfers)
        if late:
            for peer in late:
                waiters.setdefault(peer, set()).add(rank)
            continue
        standing.pop(instruction, None)
        for member in together:
            position[member] += 1
            runnable.add(member)
        if isinstance(instruction, Post):
            changed = transfers.post(rank, instruction.transfer)
            runnable |= changed.union(*(waiters.pop(one, ()) for one in changed | {rank}))
    stuck = [(rank, instruction) for rank in range(len(lists)) if (instruction := current(rank)) is not None]
    return [_deadlock(program, rank, instruction, current, position, transfers) for rank, instruction in stuck]


def _late(program: Program, rank: int, instruction: Instruction, current: Current, transfers: _Transfers) -> set[int]:
    """Returns the ranks for which `instruction` still waits."""
    if isinstance(instruction, Wait) and not program.moves_weights(instruction):
        return transfers.missing(rank, instruction.transfer)
    late = {member for member in program.together(rank, instruction) if current(member) != instruction}
    if not late and isinstance(instruction, Wait) and transfers.in_order:
        return transfers.before_chain(instruction.transfer)
    return late


def _deadlock(
    program: Program, rank: int, instruction: Instruction, current: Current, position: list[int], transfers: _Transfers
) -> Hang:
    """Says where a rank waits for ever, for which ranks, and where one of these stands."""
    late = _late(program, rank, instruction, current, transfers)
    peer = min(late, key=lambda r: (current(r) is not None, r))
    there = current(peer)
    where = f"stands at instruction {position[peer]}: {there}" if there is not None else "has ended its list"
    text = f"{instruction} waits for ever for ranks {format_ranks(tuple(sorted(late)))}; rank {peer} {where}"
    return rank, position[rank], text
