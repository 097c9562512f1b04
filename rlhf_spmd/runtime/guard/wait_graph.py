"""Makes the wait graph of a program: the ranks that each instruction waits for, as in plan/proof/deadlock.py."""

from collections.abc import Mapping, Sequence

from rlhf_spmd.plan.program.instructions import Agree, Instruction, Post, Program, Run, Wait
from rlhf_spmd.runtime.guard.diagnose import WaitGraph, WaitStep


def text_of(program: Program, step: Instruction) -> str:
    """The text of an instruction, the same on all ranks that meet at it; their positions differ."""
    moved = f" ({program.transfers[step.transfer].what})" if isinstance(step, Post | Wait) else ""
    return f"{step}{moved}"


def wait_graph_of(program: Program) -> WaitGraph:
    """The wait graph of a compiled program."""
    places: list[dict[Instruction, int]] = []
    for steps in program.instructions:
        places.append({step: position for position, step in reversed(list(enumerate(steps)))})
    lists = []
    for rank, steps in enumerate(program.instructions):
        lists.append(tuple(WaitStep(text_of(program, step), _needs(program, places, rank, step)) for step in steps))
    return WaitGraph(tuple(lists))


def _needs(
    program: Program, places: Sequence[Mapping[Instruction, int]], rank: int, step: Instruction
) -> tuple[tuple[int, int], ...]:
    met = step
    if isinstance(step, Run):
        ranks = program.groups.get(step.group, ()) if step.group else ()
    elif isinstance(step, Agree):
        ranks = tuple(program.cluster.ranks)
    elif isinstance(step, Wait) and program.transfers[step.transfer].reallocation is not None:
        ranks = program.transfers[step.transfer].ranks
    elif isinstance(step, Wait):
        met, ranks = Post(step.transfer), tuple(sorted(program.transfers[step.transfer].peers(rank)))
    else:
        ranks = ()
    return tuple((other, places[other][met]) for other in ranks if other != rank and met in places[other])
