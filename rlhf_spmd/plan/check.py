"""Proves that a program cannot deadlock, reads nothing that is not there, and fits the devices.

The proof runs the instruction lists against *blocking* semantics, the strictest that any backend has: a Run with a group
finishes only when every rank of the group stands at the same Run; a Wait finishes only when every peer of the transfer
has posted it; Agree needs all ranks. If all lists run to their end so, no order of arrival can hang the real program.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rlhf_spmd.plan.layout import format_ranks
from rlhf_spmd.plan.memory import forecast_bytes
from rlhf_spmd.plan.program import Agree, Instruction, Message, Post, Program, Run, Wait


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to know about a program; an `error` makes it unfit to start."""

    severity: str  # error | warning
    message: str
    rank: int | None = None
    position: int | None = None  # of the instruction in the rank's list

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}"
        where += "" if self.position is None else f", instruction {self.position}"
        return f"{self.severity}: {where + ': ' if where else ''}{self.message}"


def check(program: Program) -> list[Finding]:
    """Every finding about a program, errors first."""
    structural = _structure(program)
    found = structural or [*_data(program), *_order(program), *_blocking(program)]
    found += _memory(program) + _idle(program)
    return sorted(found, key=lambda finding: finding.severity != "error")


def _structure(program: Program) -> list[Finding]:
    """Instructions name groups and transfers that exist and that the rank takes part in; each transfer is used once."""
    found = []
    for rank, instructions in enumerate(program.instructions):
        posted: set[int] = set()
        waited: set[int] = set()

        def error(text: str, position: int | None = None, rank: int = rank) -> None:
            found.append(Finding("error", text, rank, position))

        for position, step in enumerate(instructions):
            if isinstance(step, Run) and step.group is not None and rank not in program.groups.get(step.group, ()):
                error(f"{step} enters a group that this rank is not in", position)
            if not isinstance(step, Post | Wait):
                continue
            seen = posted if isinstance(step, Post) else waited
            if not 0 <= step.transfer < len(program.transfers):
                error(f"{step} does not exist", position)
                continue
            if rank not in program.transfers[step.transfer].ranks:
                error(f"{step} has nothing for this rank", position)
            if step.transfer in seen:
                error(f"{step} appears twice", position)
            if isinstance(step, Wait) and step.transfer not in posted:
                error(f"{step} comes before its Post: it would wait for a message that it never started", position)
            seen.add(step.transfer)
        for number, transfer in enumerate(program.transfers):
            if rank not in transfer.ranks:
                continue
            peers = format_ranks(tuple(sorted(transfer.peers(rank))))
            if number not in posted:
                error(f"never posts transfer {number} ({program.describe(number)}): ranks {peers} would wait for ever")
            elif number not in waited:
                error(f"posts transfer {number} but never waits for it: its buffers could be freed in flight")
    return found


def _data(program: Program) -> list[Finding]:
    """Every Run finds the columns it reads, every sender has what it sends."""
    found = []
    workload = program.workload
    for rank, instructions in enumerate(program.instructions):
        held: dict[str, set[int]] = {key: set(range(workload.mini_batch)) for key in workload.workflow.given}
        for position, step in enumerate(instructions):
            if isinstance(step, Run):
                call = workload.workflow.call(step.call)
                columns = _run_columns(program, step, rank)
                for key in call.inputs:
                    lacking = sorted(set(columns) - held.get(key, set()))
                    if lacking:
                        text = f"{step} reads {key} of columns {format_ranks(tuple(lacking))}, which never arrive here"
                        found.append(Finding("error", text, rank, position))
                for key in call.outputs:
                    held.setdefault(key, set()).update(columns)
            elif isinstance(step, Post | Wait):
                transfer = program.transfers[step.transfer]
                for message in transfer.messages:
                    if isinstance(step, Wait) and message.destination == rank:
                        for key in transfer.keys:
                            held.setdefault(key, set()).update(message.columns)
                    if isinstance(step, Post) and message.source == rank:
                        found += _unsent(transfer.keys, message, held, rank, position)
    return found


def _unsent(keys: tuple[str, ...], message: Message, held: dict, rank: int, position: int) -> list[Finding]:
    lacking = [key for key in keys if set(message.columns) - held.get(key, set())]
    text = f"sends {', '.join(lacking)} to rank {message.destination} before it has it"
    return [Finding("error", text, rank, position)] if lacking else []


def _run_columns(program: Program, step: Run, rank: int) -> range:
    """Columns that a Run computes on a rank."""
    workload = program.workload
    call = workload.workflow.call(step.call)
    if call.kind != "compute":
        layouts = [program.placement.layouts[call.name]]
    else:  # a compute runs where its results are read
        readers = workload.workflow.consumers(call.outputs)
        layouts = [program.placement.layouts[c.name] for c in readers if c.kind != "compute"]
    for layout in layouts:
        if rank in layout.ranks:
            return layout.columns(rank, workload.mini_batch)
    return range(0)


def _order(program: Program) -> list[Finding]:
    """Both ends of every pair post their common transfers in one order, as backends without tags require."""
    found = []
    orders = [[step.transfer for step in steps if isinstance(step, Post)] for steps in program.instructions]
    peers = [transfer.ranks for transfer in program.transfers]
    for rank, mine in enumerate(orders):
        partners = {peer for number in mine for peer in peers[number] if peer > rank}
        for peer in sorted(partners):
            common = [n for n in mine if peer in program.transfers[n].peers(rank)]
            theirs = [n for n in orders[peer] if rank in program.transfers[n].peers(peer)]
            if common != theirs:
                text = f"posts transfers {common} with rank {peer}, which posts them as {theirs}"
                found.append(Finding("error", text, rank))
    return found


def _blocking(program: Program) -> list[Finding]:
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
        elif len(together) == 1:
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
    if isinstance(step, Wait):
        peers = program.transfers[step.transfer].peers(rank)
        return {peer for peer in peers if step.transfer not in posted[peer]}, (rank,)
    return set(), (rank,)


def _deadlock(program: Program, rank: int, current: Callable, position: list[int], posted: list) -> Finding:
    """Says where a rank stands for ever and where those stand that it waits for."""
    step = current(rank)
    late, _ = _late(program, rank, step, current, posted)
    culprit = min(late, key=lambda r: (current(r) is not None, r))
    there = current(culprit)
    where = f"stands at instruction {position[culprit]}: {there}" if there is not None else "has ended its list"
    text = f"{step} waits for ever for ranks {format_ranks(tuple(sorted(late)))}; rank {culprit} {where}"
    return Finding("error", text, rank, position[rank])


def _memory(program: Program) -> list[Finding]:
    """Static bytes per rank against the device; one finding per set of equal ranks."""
    found: dict[tuple[int, int], list[int]] = {}
    for rank in program.cluster.ranks:
        limit = program.cluster.device_bytes(rank)
        need = sum(forecast_bytes(program, rank).values())
        if limit is not None and need > limit:
            found.setdefault((need, limit), []).append(rank)
    return [
        Finding(
            "error",
            f"ranks {format_ranks(tuple(ranks))} need {need / 2**30:.1f} GiB for weights, gradients and optimizer state, "
            f"but the device has {limit / 2**30:.0f} GiB: raise the ZeRO stage, split the models, or use more devices",
        )
        for (need, limit), ranks in found.items()
    ]


def _idle(program: Program) -> list[Finding]:
    found = []
    for call in program.workload.workflow.placed_calls:
        layout = program.placement.layouts[call.name]
        empty = [rank for rank in layout.ranks if not layout.columns(rank, program.workload.mini_batch)]
        if empty:
            text = (
                f"{call.name}: ranks {format_ranks(tuple(empty))} get no sequence, because mini_batch "
                f"{program.workload.mini_batch} is smaller than dp {layout.dp}; raise mini_batch"
            )
            found.append(Finding("warning", text))
    idle = [rank for rank, steps in enumerate(program.instructions) if not any(isinstance(s, Run) for s in steps)]
    if idle:
        found.append(Finding("warning", f"ranks {format_ranks(tuple(idle))} run no call in this placement"))
    return found
