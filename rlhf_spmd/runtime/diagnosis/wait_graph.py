"""Makes the wait graph of a program: the ranks that each instruction waits for, as in plan/proof/deadlock.py."""

from collections.abc import Mapping, Sequence

from rlhf_spmd.plan.program.instructions import Instruction, Post, Program, Wait
from rlhf_spmd.runtime.diagnosis.diagnose import Needs, WaitGraph, WaitStep

Places = Sequence[Mapping[Instruction, int]]  # [rank], instruction -> position in its list


def text_of(program: Program, step: Instruction) -> str:
    """The text of an instruction, the same on all ranks that meet at it; their positions differ."""
    moved = f" ({program.transfers[step.transfer].what})" if isinstance(step, Post | Wait) else ""
    return f"{step}{moved}"


def wait_graph_of(program: Program) -> WaitGraph:
    """The wait graph of a compiled program. A Post waits for no rank."""
    places, lists = places_of(program), []
    for rank, steps in enumerate(program.instructions):
        needs = (() if isinstance(step, Post) else needs_of(program, rank, step, places) for step in steps)
        lists.append(tuple(WaitStep(text_of(program, step), need) for step, need in zip(steps, needs, strict=True)))
    return WaitGraph(tuple(lists))


def needs_of(program: Program, rank: int, step: Instruction, places: Places) -> Needs:
    """The instructions that other ranks must begin before this one, and the messages that it posts, can end."""
    met, ranks = program.meets(rank, step)
    return tuple((other, places[other][met]) for other in ranks if met in places[other])


def places_of(program: Program) -> Places:
    """The position of every instruction in the list of every rank; of equal ones the first."""
    return [{step: place for place, step in reversed(list(enumerate(steps)))} for steps in program.instructions]
