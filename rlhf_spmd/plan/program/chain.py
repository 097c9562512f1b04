"""A chain of iterations: each rank goes on to the next iteration when it can, and only data order the two.

ReaL (arXiv 2406.14088) orders iterations in this way: the first call of a model waits for the last call of that model
in the iteration before, so that responses are generated as soon as the actor has trained, while the critic still does.
Nothing is older than without a chain. Rows are those of one iteration; what two iterations have in common are weights.
A rank that trains a model sends its new weights at once and goes on when they have arrived, so that they do not change
meanwhile. A rank that only has a copy waits for them in the next iteration, before the first Run that reads the copy:
then all its Runs of the iteration before are over. These instructions are *delayed*: the list of an iteration has those
that belong to the iteration before. Before an evaluation, a checkpoint or the end, the chain is drained: each rank
executes the delayed instructions of its last iteration alone, and meets the others.

The list of two iterations in a row has everything that a longer one has: an instruction waits for instructions of its
own iteration, of the one before, or (new weights, until copies have them) of the one after. docs/numerics.md says why
the numbers are the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlhf_spmd.plan.calls import Compute, Train
from rlhf_spmd.plan.placement import Placement, ranks_of
from rlhf_spmd.plan.program.instructions import Agree, Instruction, Post, Program, Run, Transfer, Wait, delay_of
from rlhf_spmd.plan.workload import Workload


def order_of_training(workload: Workload, placement: Placement) -> tuple[list[Train], list[Train]]:
    """Returns the calls that train while mini-batches arrive, and those that train after them. In a chain the latter
    are those whose ranks train another model, whose weights are used earlier in an iteration."""
    workflow = workload.workflow
    calls = [call for call in workflow.calls if isinstance(call, Train)]
    if not placement.chains(workload):
        return calls, []
    models = [call.model for call in workflow.placed_calls]
    now: list[Train] = []
    for call in sorted(calls, key=lambda call: models.index(call.model)):
        others = [set(placement.layouts[other.name].ranks) for other in now]
        if all(other.isdisjoint(placement.layouts[call.name].ranks) for other in others):
            now.append(call)
    return now, [call for call in sorted(calls, key=lambda call: models.index(call.model)) if call not in now]


def returns_early(transfer: Transfer, trained: Train, workload: Workload, placement: Placement) -> bool:
    """Returns whether new weights leave as soon as their model has trained: in a chain, if no rank that gets them has
    another model to train after that."""
    if not placement.chains(workload):
        return False
    order = sum(order_of_training(workload, placement), [])
    later = order[order.index(trained) + 1 :]
    return all(set(transfer.ranks).isdisjoint(_only(placement, call, trained)) for call in later)


def _only(placement: Placement, call: Train, trained: Train) -> set[int]:
    """Returns the ranks that train one model, and not the other."""
    return set(placement.layouts[call.name].ranks) - set(placement.layouts[trained.name].ranks)


def place_delayed(
    instructions: list[Instruction], rank: int, weights: Sequence[tuple[int, Transfer]], workload: Workload
) -> None:
    """Inserts into the list of a rank that only receives new weights where it waits for those of the iteration before,
    and after all of these that it tells what it has counted in it.

    weights: transfers, by number.
    """
    done = {step.transfer for step in instructions if isinstance(step, Wait)}
    place = 0
    for number, transfer in weights:
        if rank not in transfer.ranks or number in done:
            continue
        calls = {call.name for call in workload.workflow.placed_calls if call.model == transfer.model}
        first = next(i for i, step in enumerate(instructions) if isinstance(step, Run) and step.call in calls)
        start = max((i + 1 for i, step in enumerate(instructions[:first]) if isinstance(step, Run)), default=0)
        while isinstance(instructions[start], Post):
            start += 1
        instructions[start:start] = [Post(number, delay=1), Wait(number, delay=1)]
        place = max(place, start + 2)
    instructions.insert(place, Agree("metrics", delay=1))


def place_state(instructions: list[Instruction], rank: int, workload: Workload, placement: Placement) -> None:
    """Inserts into the list of a rank where it agrees on the state of the next iteration, if its functions read that:
    behind its last compute, or before it trains."""
    workflow = workload.workflow
    readers = [call for call in workflow.calls if isinstance(call, Compute | Train)]
    ranks = {
        one
        for call in readers
        for site in placement.sites(call, workflow)
        for one in ranks_of(call, placement.layouts[site])
    }
    if not workload.state_sums or rank not in ranks:
        return
    computes, trains = ({call.name for call in calls} for calls in (workflow.computes, workflow.train_calls))
    runs = [(i, step.call) for i, step in enumerate(instructions) if isinstance(step, Run)]
    behind, before = [i + 1 for i, name in runs if name in computes], [i for i, name in runs if name in trains]
    instructions.insert(behind[-1] if behind else before[0], Agree("state", tuple(sorted(ranks))))


def unrolled(program: Program, num: int) -> Program:
    """Returns the program of some iterations in a row, at the end of which the chain is drained."""
    size = len(program.transfers)
    lists = (tuple(_in_a_row(instructions, num, size)) for instructions in program.instructions)
    return replace(program, transfers=program.transfers * num, instructions=tuple(lists))


def _in_a_row(instructions: Sequence[Instruction], num: int, size: int) -> Iterator[Instruction]:
    """Yields what a rank executes in so many iterations, of which each has `size` transfers."""
    for step in range(num + 1):
        for instruction in instructions:
            iteration = step - delay_of(instruction)
            if not 0 <= iteration < num:
                continue
            if isinstance(instruction, Agree):
                if not instruction.delay:
                    yield replace(instruction, what=f"{instruction.what} after iteration {iteration}")
                elif iteration == num - 1:
                    yield Agree(instruction.what)
            elif isinstance(instruction, Run):
                yield replace(instruction, iteration=iteration)
            elif isinstance(instruction, Post | Wait):
                yield type(instruction)(instruction.transfer + iteration * size)
            else:
                yield instruction
