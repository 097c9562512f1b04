"""Who waits for whom: runs the instruction lists of all ranks against *blocking* semantics.

These are the strictest that any backend has: a Run with a group finishes only when every rank of the group stands at
the same Run; a Wait finishes only when every peer of the transfer has posted it, and for weights, whose buckets travel
along chains of ranks, when all its ranks stand at the same Wait; Agree needs all ranks; and some backends (NCCL) carry
out a rank's transfers one after another, in the order of their posts, so that one which waits for a peer holds up the
next. If all lists run to their end so, no order of arrival can hang the real program.
"""

from collections.abc import Callable, Sequence

from rlhf_spmd.plan.layout import format_ranks
from rlhf_spmd.plan.program import Agree, Instruction, Post, Program, Run, Wait

Hang = tuple[int, int, str]  # rank, position of the instruction in its list, what is wrong with it


def misorders(program: Program) -> list[Hang]:
    """All ranks post in one global order: taking away what stands first on all its ranks must take away everything."""
    queues = [
        [(position, step.transfer) for position, step in enumerate(steps) if isinstance(step, Post)]
        for steps in program.instructions
    ]
    ranks_of = [transfer.ranks for transfer in program.transfers]
    heads = [0] * len(queues)

    def head(rank: int) -> int | None:
        return queues[rank][heads[rank]][1] if heads[rank] < len(queues[rank]) else None

    changed = set(range(len(queues)))
    while changed:
        number = head(changed.pop())
        if number is not None and all(head(rank) == number for rank in ranks_of[number]):
            for rank in ranks_of[number]:
                heads[rank] += 1
            changed.update(ranks_of[number])
    found = []
    for rank, queue in enumerate(queues):
        number = head(rank)
        if number is None:
            continue
        peer, other = next((peer, head(peer)) for peer in ranks_of[number] if head(peer) != number)
        text = f"posts transfer {number} here, while rank {peer} posts transfer {other} first: the orders do not fit"
        found.append((rank, queue[heads[rank]][0], text))
    return found


def hangs(program: Program) -> list[Hang]:
    """Everything that can hang: the orders of posts first, since what follows from them is harder to read."""
    found = [*misorders(program), *deadlocks(program)]
    return found or deadlocks(program, in_order=True)


class _Transfers:
    """What ranks have posted. in_order: a rank's transfers are carried out one after another."""

    def __init__(self, program: Program, in_order: bool):
        self.transfers, self.in_order = program.transfers, in_order
        self.posted: list[set[int]] = [set() for _ in program.instructions]
        self._known: dict[tuple[int, int], set[int]] = {}  # (rank, transfer) -> peers
        self._queues: list[list[int]] = [[] for _ in program.instructions]
        self._heads = [0] * len(program.instructions)
        self._come: set[tuple[int, int]] = set()  # (rank, transfer) that it has come to, or finished
        self._left: dict[tuple[int, int], int] = {}  # (rank, transfer) -> peers that have not come to it
        self._absent: dict[int, int] = {}  # transfer of weights -> ranks that have not come to it

    def post(self, rank: int, number: int) -> set[int]:
        """-> the ranks for which something may have changed."""
        self.posted[rank].add(number)
        if not self.in_order:
            return {rank}
        self._queues[rank].append(number)
        changed, arrived = {rank}, [(rank, number)] if self._head(rank) == number else []
        while arrived:  # ranks that have come to a transfer
            one, number = arrived.pop()
            again = (one, number) in self._come  # posted twice
            self._come.add((one, number))
            for candidate in self._released(one, number, again=again):
                if self._head(candidate) == number:
                    self._heads[candidate] += 1
                    changed.add(candidate)
                    if (after := self._head(candidate)) is not None:
                        arrived.append((candidate, after))
        return changed

    def _released(self, rank: int, number: int, *, again: bool) -> Sequence[int]:
        """Of a transfer's ranks those whose peers have all come to it, now that this one has (again)."""
        transfer = self.transfers[number]
        if transfer.reallocation is not None:  # each is the peer of all others: nobody before the last one has come
            self._absent[number] = self._absent.get(number, len(transfer.ranks)) - (not again)
            return () if self._absent[number] else transfer.ranks
        peers = self._peers(rank, number)
        for peer in peers if not again else ():
            self._left[peer, number] = self._left.get((peer, number), len(self._peers(peer, number))) - 1
        candidates = (rank, *peers)
        return [one for one in candidates if not self._left.get((one, number), len(self._peers(one, number)))]

    def missing(self, rank: int, number: int) -> set[int]:
        """Whom a posted transfer still waits for."""
        if not self.in_order:
            return {peer for peer in self._peers(rank, number) if number not in self.posted[peer]}
        mine, first = self._queues[rank], self._head(rank)  # what holds it up, or itself
        if number in mine[: self._heads[rank]]:
            return set()
        if first is None:
            return {rank}  # it waits for what it has not posted
        return {peer for peer in self._peers(rank, first) if (peer, first) not in self._come}

    def _head(self, rank: int) -> int | None:
        queue = self._queues[rank]
        return queue[self._heads[rank]] if self._heads[rank] < len(queue) else None

    def _peers(self, rank: int, number: int) -> set[int]:
        if (rank, number) not in self._known:
            transfer = self.transfers[number]
            weights = transfer.reallocation is not None
            self._known[rank, number] = set(transfer.ranks) - {rank} if weights else set(transfer.peers(rank))
        return self._known[rank, number]


def deadlocks(program: Program, *, in_order: bool = False) -> list[Hang]:
    """Runs all lists under blocking semantics; whoever is left standing is a finding. in_order: transfers are carried
    out one after another, as posted."""
    lists = program.instructions
    position = [0] * len(lists)
    transfers = _Transfers(program, in_order)

    def current(rank: int) -> Instruction | None:
        return lists[rank][position[rank]] if position[rank] < len(lists[rank]) else None

    runnable = set(range(len(lists)))
    standing: dict[Instruction, set[int]] = {}  # what ranks do together -> who stands at it
    waiters: dict[int, set[int]] = {}  # rank -> ranks that it may release
    while runnable:
        rank = runnable.pop()
        step = current(rank)
        if step is None:
            continue
        together = _members(program, rank, step)
        if len(together) > 1:
            here = standing.setdefault(step, set())
            here.add(rank)
            if len(here) < len(together):
                continue
        late = _late(program, rank, step, current, transfers)
        if late:
            for peer in late:
                waiters.setdefault(peer, set()).add(rank)
            continue
        standing.pop(step, None)
        for member in together:
            position[member] += 1
            runnable.add(member)
        if isinstance(step, Post):
            changed = transfers.post(rank, step.transfer)
            runnable |= changed.union(*(waiters.pop(one, ()) for one in changed | {rank}))
    stuck = [rank for rank in range(len(lists)) if current(rank) is not None]
    return [_deadlock(program, rank, current, position, transfers) for rank in stuck]


def _members(program: Program, rank: int, step: Instruction) -> tuple[int, ...]:
    """The ranks that pass an instruction together."""
    if isinstance(step, Run) and step.group is not None:
        return program.groups[step.group]
    if isinstance(step, Agree):
        return tuple(range(len(program.instructions)))
    if isinstance(step, Wait) and program.transfers[step.transfer].reallocation is not None:
        return program.transfers[step.transfer].ranks
    return (rank,)


def _late(program: Program, rank: int, step: Instruction, current: Callable, transfers: _Transfers) -> set[int]:
    """Ranks that `step` still waits for."""
    moves_weights = isinstance(step, Wait) and program.transfers[step.transfer].reallocation is not None
    if isinstance(step, Wait) and not moves_weights:
        return transfers.missing(rank, step.transfer)
    members = _members(program, rank, step)
    late = {member for member in members if current(member) != step}
    if moves_weights and not late and transfers.in_order:
        late = late.union(*(transfers.missing(member, step.transfer) for member in members))
    return late


def _deadlock(program: Program, rank: int, current: Callable, position: list[int], transfers: _Transfers) -> Hang:
    """Says where a rank stands for ever and where those stand that it waits for."""
    step = current(rank)
    late = _late(program, rank, step, current, transfers)
    culprit = min(late, key=lambda r: (current(r) is not None, r))
    there = current(culprit)
    where = f"stands at instruction {position[culprit]}: {there}" if there is not None else "has ended its list"
    text = f"{step} waits for ever for ranks {format_ranks(tuple(sorted(late)))}; rank {culprit} {where}"
    return rank, position[rank], text
