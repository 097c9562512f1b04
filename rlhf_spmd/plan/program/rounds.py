"""Rounds of sampling: groups that fail are sampled again with further prompts before the rest of an iteration (DAPO's
dynamic sampling, arXiv 2503.14476).

A compute with `rounds` (calls.py) decides which groups fail. It, and every call that it needs, directly or not, comes
first in an iteration, and is in the program once for each round, with the moves between them. Each round but the first
begins with an Agree, by which its ranks learn which groups failed. If none did, they leave out what is left of the
rounds. Else the groups get other prompts, and the Runs of the round replace their rows; messages carry all rows.
"""

from dataclasses import replace

from rlhf_spmd.plan.calls import Compute, Workflow, trains
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.placement import Placement, ranks_of
from rlhf_spmd.plan.program.instructions import Agree, Instruction, Post, Program, Wait
from rlhf_spmd.plan.workload import Workload


def deciding(workflow: Workflow) -> Compute | None:
    """Returns the compute that decides which groups fail; None: there are no rounds."""
    return next((call for call in workflow.computes if call.rounds > 1), None)


def repeated(workflow: Workflow) -> frozenset[str]:
    """Returns the calls of every round: the deciding compute, and all calls that it needs."""
    last = deciding(workflow)
    names, keys = ({last.name}, set(last.inputs)) if last else (set(), set())
    for call in reversed(workflow.calls):
        if keys.intersection(call.outputs):
            names.add(call.name)
            keys.update(call.inputs)
    return frozenset(names)


def with_rounds(workload: Workload, placement: Placement) -> tuple[Workload, Placement]:
    """Puts the calls of rounds before all others; calls exchange together only with those of their kind."""
    inside = repeated(workload.workflow)
    if not inside:
        return workload, placement
    calls = tuple(sorted(workload.workflow.calls, key=lambda call: call.name not in inside))
    parts = (tuple(name for name in names if (name in inside) == kind) for names in placement.joint for kind in (1, 0))
    workload = replace(workload, workflow=replace(workload.workflow, calls=calls))
    return workload, replace(placement, joint=tuple(filter(None, parts)))


def agreeing(workload: Workload, placement: Placement, cluster: Cluster) -> tuple[int, ...]:
    """Returns the ranks that agree before a round: all, or one iteration ahead those that sample, so that training does
    not wait for them."""
    if not placement.ahead:
        return tuple(cluster.ranks)
    workflow = workload.workflow
    calls = [call for call in workflow.calls if not trains(call, workflow)]
    sites = [(call, placement.layouts[site]) for call in calls for site in placement.sites(call, workflow)]
    return tuple(sorted({rank for call, layout in sites for rank in ranks_of(call, layout)}))


def some_agree(program: Program) -> bool:
    """Returns whether some ranks agree without all others: in a chain, or on rounds one iteration ahead."""
    return program.chains or (program.placement.ahead > 0 and program.workload.rounds > 1)


def round_of(program: Program, instruction: Instruction) -> int:
    """Returns the round that an instruction belongs to; 0: the first one, or none."""
    if isinstance(instruction, Post | Wait):
        return program.transfers[instruction.transfer].round if instruction.transfer < len(program.transfers) else 0
    return getattr(instruction, "round", 0)


def prefix(program: Program, num: int) -> Program:
    """Returns the program of an iteration whose batch is full after so many rounds."""
    lists = (
        tuple(one for one in some if round_of(program, one) < num or _is_meeting(one, num))
        for some in program.instructions
    )
    return replace(program, instructions=tuple(lists))


def _is_meeting(instruction: Instruction, number: int) -> bool:
    """Returns whether this is the Agree with which a round begins."""
    return isinstance(instruction, Agree) and instruction.round == number
