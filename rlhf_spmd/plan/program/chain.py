"""A chain of iterations: each rank goes on to the next iteration when it can, and only data order the two.

ReaL (arXiv 2406.14088) orders iterations in this way: the first call of a model waits for the last call of that model
in the iteration before, so that responses are generated as soon as the actor has trained, while the critic still does.
Nothing is older than without a chain. Rows are those of one iteration; what two iterations have in common are weights.
A rank that trains a model sends its new weights at once and goes on when they have arrived, so that they do not change
meanwhile. A rank that only has a copy waits for them in the next iteration, before the first Run that reads the copy:
then its Runs of the iteration before have ended. These instructions are *delayed*: the list of an iteration has those
that belong to the iteration before. Before an evaluation, a checkpoint or the end, the chain is drained: each rank
executes the delayed instructions of its last iteration alone, and meets the other ranks.

Each call reads the rows and the weights that it reads without a chain, so the numbers are the same. plan/proof/
deadlock.py proves that nothing hangs.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rlhf_spmd.plan.calls import Call, Compute, Train
from rlhf_spmd.plan.placement import Placement, ranks_of
from rlhf_spmd.plan.program.instructions import (
    Agree,
    Instruction,
    Offload,
    Post,
    Program,
    Run,
    Transfer,
    Wait,
)
from rlhf_spmd.plan.program.transfers import Move
from rlhf_spmd.plan.workload import Workload

Delayed = tuple[int, Transfer, frozenset[str]]  # number of a transfer of new weights, the transfer, calls_before


def order_of_training(workload: Workload, placement: Placement) -> tuple[list[Train], list[Train]]:
    """Returns the calls that train while mini-batches arrive, and those that train after them. In a chain the latter
    are those whose ranks train another model, whose weights are used earlier in an iteration."""
    workflow = workload.workflow
    calls = [call for call in workflow.calls if isinstance(call, Train)]
    if not placement.chains(workload):
        return calls, []
    models = [call.model for call in workflow.placed_calls]
    calls.sort(key=lambda call: models.index(call.model))
    now: list[Train] = []
    for call in calls:
        others = [set(placement.layouts[other.name].ranks) for other in now]
        if all(other.isdisjoint(placement.layouts[call.name].ranks) for other in others):
            now.append(call)
    return now, [call for call in calls if call not in now]


def in_order(workload: Workload, placement: Placement) -> Workload:
    """Returns the workload with training in the order of a chain: rows go to the first call that reads them."""
    if not placement.chains(workload):
        return workload
    before = (call for call in workload.workflow.calls if not isinstance(call, Train))
    calls = (*before, *sum(order_of_training(workload, placement), []))
    return replace(workload, workflow=replace(workload.workflow, calls=calls))


def return_early(weights: Sequence[Move], workload: Workload, placement: Placement) -> bool:
    """Returns whether new weights leave as soon as their model has trained: in a chain, if no rank that gets some has
    another model to train after that. All do or none: a rank that waits for some at the end of an iteration, and for
    others in the next one, would do so in another order than ranks that send both."""
    order = sum(order_of_training(workload, placement), [])
    names = [call.name for call in order]
    ranks = [set(placement.layouts[name].ranks) for name in names]
    for move in weights:
        place = names.index(move.producers[0])
        if any((later - ranks[place]).intersection(move.transfer.ranks) for later in ranks[place + 1 :]):
            return False
    return placement.chains(workload)


def calls_before(
    trained: Train,
    units: Iterable[Sequence[Call]],
    moves: Sequence[Move],
    workload: Workload,
    placement: Placement,
    *,
    by_host: bool,
) -> frozenset[str]:
    """Returns the calls of the next iteration that ranks with a copy of a model run before they wait for its new
    weights. It is the same for all copies: calls before the first use of the model that end even if no rank that trains
    it, or trains after that, goes on. Such a rank runs none of them, and none reads a message that comes after one to
    such a rank.

    trained: the call that trains the model.
    units, moves: of the compiler.
    by_host: of place_delayed; if not, none reads any message.
    """
    order = sum(order_of_training(workload, placement), [])
    training = order[order.index(trained) :]
    models = {call.model for call in training}
    busy = {rank for call in training for rank in placement.layouts[call.name].ranks}
    found: set[str] = set()
    blocked: set[int] = set()  # ranks with a message under way to a busy one
    behind: set[str] = set()  # calls that read messages which come after such a one
    for unit in units:
        names = {call.name for call in unit}
        sites = (site for call in unit for site in placement.sites(call, workload.workflow))
        ranks = {rank for site in sites for rank in placement.layouts[site].ranks}
        if busy & ranks or behind & names or models & {call.model for call in unit}:
            break
        found |= names
        for move in (move for move in moves if move.producers[0] in names):
            if not by_host or blocked.intersection(move.transfer.ranks):
                behind.update(move.consumers)
            if busy.intersection(move.transfer.ranks):
                blocked.update(message.source for message in move.transfer.messages)
    return frozenset(found)


def place_delayed(instructions: list[Instruction], rank: int, delayed: Sequence[Delayed], *, by_host: bool) -> None:
    """Inserts into the list of a rank that only receives new weights where it waits for those of the iteration before,
    and after all of these its report on that iteration.

    delayed: in the order in which they leave.
    by_host: whether all rows go through host memory. If not, rows are in the communicator of the weights, which works
        in order, so that weights come before them.
    """
    done = {step.transfer for step in instructions if isinstance(step, Wait)}
    place = 0
    for number, transfer, calls in delayed:
        if rank not in transfer.ranks or number in done:
            continue
        for position, step in enumerate(instructions[place:], start=place):
            if isinstance(step, Run) and step.call not in calls:
                break
            if isinstance(step, Run):
                place = position + 1
        while isinstance(instructions[place], Post | Offload if by_host else Offload):
            place += 1
        instructions[place:place] = [Post(number, delay=1), Wait(number, delay=1)]
        place += 2
    if not by_host:
        rows = [step for step in instructions[:place] if isinstance(step, Post | Wait) and not step.delay]
        instructions[:place] = [*(step for step in instructions[:place] if step not in rows), *rows]
    instructions.insert(place, Agree("metrics", delay=1))


def ranks_of_state(workload: Workload, placement: Placement) -> tuple[int, ...]:
    """Returns the ranks that agree on the state of the next iteration when all computes of a chain's iteration are
    over: those whose functions read it. Empty if there is none, or all ranks meet anyway."""
    if not (workload.state_sums and placement.chains(workload)):
        return ()
    readers = [call for call in workload.workflow.calls if isinstance(call, Compute | Train)]
    sites = [(call, placement.layouts[site]) for call in readers for site in placement.sites(call, workload.workflow)]
    return tuple(sorted({rank for call, layout in sites for rank in ranks_of(call, layout)}))


def unrolled(program: Program, num: int) -> Program:
    """Returns the program of some iterations in a row, at the end of which a chain is drained; without delays."""
    lists = ((step for _, _, step in in_a_row(program, rank, num)) for rank in range(len(program.instructions)))
    return replace(program, transfers=program.transfers * num, instructions=tuple(map(tuple, lists)))


def in_a_row(program: Program, rank: int, num: int) -> Iterator[tuple[int, int, Instruction]]:
    """Yields a rank's instructions in some iterations: the position in its list, the iteration, the instruction."""
    size = len(program.transfers)
    for step in range(num + 1):
        for position, instruction in enumerate(program.instructions[rank]):
            iteration = step - instruction.delay
            # also after the prologue
            meets = program.placement.ahead > 0 and isinstance(instruction, Agree) and not instruction.round
            if not (0 <= iteration < num or meets):
                continue
            if isinstance(instruction, Agree):
                if instruction.ranks:
                    instruction = replace(instruction, what=f"{instruction.what} after iteration {iteration}")
                elif program.chains and iteration < num - 1:
                    continue
                else:
                    instruction = Agree(f"{instruction.what} after step {step}")
            elif isinstance(instruction, Run):
                instruction = replace(instruction, iteration=iteration, delay=0)
            elif isinstance(instruction, Post | Wait):
                instruction = type(instruction)(instruction.transfer + iteration * size)
            yield position, iteration, instruction
