"""Makes the wait graph of a program: the ranks that each instruction waits for, as in plan/proof/deadlock.py."""

from collections.abc import Mapping, Sequence

from rlhf_spmd.plan.program.instructions import Instruction, Post, Program, Wait
from rlhf_spmd.runtime.diagnosis.diagnose import InstructionNeeds, Needs, WaitGraph

Places = Sequence[Mapping[Instruction, int]]  # [rank], instruction -> position in its list


def text_of(program: Program, instruction: Instruction) -> str:
    """Returns the text of an instruction, the same on all ranks that meet at it; their positions differ."""
    moved = f" ({program.transfers[instruction.transfer].what})" if isinstance(instruction, Post | Wait) else ""
    return f"{instruction}{moved}"


def wait_graph_of(program: Program) -> WaitGraph:
    """Returns the wait graph of a compiled program. A Post waits for no rank."""
    places, lists = places_of(program), []
    for rank, instructions in enumerate(program.instructions):
        needs = (
            () if isinstance(instruction, Post) else needs_of(program, rank, instruction, places)
            for instruction in instructions
        )
        lists.append(
            tuple(
                InstructionNeeds(text_of(program, instruction), need)
                for instruction, need in zip(instructions, needs, strict=True)
            )
        )
    return WaitGraph(tuple(lists))


def needs_of(program: Program, rank: int, instruction: Instruction, places: Places) -> Needs:
    """Returns the instructions that other ranks must begin before this one, and the messages that it posts, can end."""
    met, ranks = program.meets(rank, instruction)
    return tuple((other, places[other][met]) for other in ranks if met in places[other])


def places_of(program: Program) -> Places:
    """Returns the position of every instruction in the list of every rank; of equal ones the first."""
    return [
        {instruction: place for place, instruction in reversed(list(enumerate(instructions)))}
        for instructions in program.instructions
    ]
