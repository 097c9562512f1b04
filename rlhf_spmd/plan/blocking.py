"""Who waits for whom: runs the instruction lists of all ranks against *blocking* semantics.

These are the strictest that any backend has: a Run with a group finishes only when every rank of the group stands at
the same Run; a Wait finishes only when every peer of the transfer has posted it, and for weights, whose buckets travel
along chains of ranks, when all its ranks stand at the same Wait; Agree needs all ranks; and all ranks post in one
global order, since some backends (NCCL) carry out a rank's transfers one after another. If all lists run to their end
so, no order of arrival can hang the real program.
"""

from collections.abc import Callable

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


def deadlocks(program: Program) -> list[Hang]:
    """Runs all lists under blocking semantics; whoever is left standing is a finding."""
    lists = program.instructions
    position = [0] * len(lists)
    posted: list[set[int]] = [set() for _ in lists]

    def current(rank: int) -> Instruction | None:
        return lists[rank][position[rank]] if position[rank] < len(lists[rank]) else None

    runnable = set(range(len(lists)))
    waiting_for: dict[int, set[int]] = {}  # rank -> ranks that may release it
    while runnable:
        rank = runnable.pop()
        step = current(rank)
        if step is None:
            continue
        late, together = _late(program, rank, step, current, posted)
        if late:
            waiting_for[rank] = late
            continue
        for member in together:
            position[member] += 1
            waiting_for.pop(member, None)
            runnable.add(member)
        if isinstance(step, Post):
            posted[rank].add(step.transfer)
            runnable |= {r for r, peers in waiting_for.items() if rank in peers}
    stuck = [rank for rank in range(len(lists)) if current(rank) is not None]
    return [_deadlock(program, rank, current, position, posted) for rank in stuck]


def _late(
    program: Program, rank: int, step: Instruction, current: Callable, posted: list[set[int]]
) -> tuple[set[int], tuple[int, ...]]:
    """Ranks that `step` still waits for, and the ranks that pass it together when there are none."""
    if isinstance(step, Run) and step.group is not None:
        members = program.groups[step.group]
        return {member for member in members if current(member) != step}, members
    if isinstance(step, Agree):
        everyone = range(len(program.instructions))
        return {member for member in everyone if current(member) != step}, tuple(everyone)
    if isinstance(step, Wait) and program.transfers[step.transfer].reallocation is not None:
        members = program.transfers[step.transfer].ranks
        return {member for member in members if current(member) != step}, members
    if isinstance(step, Wait):
        peers = program.transfers[step.transfer].peers(rank)
        return {peer for peer in peers if step.transfer not in posted[peer]}, (rank,)
    return set(), (rank,)


def _deadlock(program: Program, rank: int, current: Callable, position: list[int], posted: list) -> Hang:
    """Says where a rank stands for ever and where those stand that it waits for."""
    step = current(rank)
    late, _ = _late(program, rank, step, current, posted)
    culprit = min(late, key=lambda r: (current(r) is not None, r))
    there = current(culprit)
    where = f"stands at instruction {position[culprit]}: {there}" if there is not None else "has ended its list"
    text = f"{step} waits for ever for ranks {format_ranks(tuple(sorted(late)))}; rank {culprit} {where}"
    return rank, position[rank], text
