"""One iteration ahead: the program of a step in which one batch trains while the next one is drawn (Placement.ahead).

A step k trains batch k beside everything that comes before the training of batch k + 1, which is drawn with the weights
after step k - 1; then the new weights go to their copies. So a batch is one iteration old when it trains, neither more
nor less. A run has three lists of instructions, each of which ends with all its Waits and the Agree, so that no message
crosses a step: the prologue draws the first batch, steps draw and train, the epilogue trains the last batch. All three
are the list of a step, or parts of it. Rows that are drawn and rows that train are in different stores.
"""

from dataclasses import replace

from rlhf_spmd.plan.program.instructions import Agree, Instruction, Post, Program, Run, Wait
from rlhf_spmd.plan.workflow import trains

STEP, PROLOGUE, EPILOGUE = "", "prologue", "epilogue"  # Program.part


def draws(program: Program, instruction: Instruction) -> bool:
    """Whether an instruction of a step works on the batch that is drawn, and not on the one that trains."""
    workflow = program.workload.workflow
    if isinstance(instruction, Run):
        return not trains(workflow.call(instruction.call), workflow)
    if isinstance(instruction, Post | Wait):
        return transfer_draws(program, instruction.transfer)
    return not isinstance(instruction, Agree)  # weights that leave the device are those of frozen models


def drawn_by(program: Program, rank: int) -> bool:
    """Whether a rank makes anything of the batch that a step draws."""
    if not program.placement.ahead:
        return False
    runs = (one for one in program.instructions[rank] if isinstance(one, Run) and draws(program, one))
    return any(program.makes(run, rank) for run in runs)


def transfer_draws(program: Program, number: int) -> bool:
    """Whether a transfer carries rows, or the notice of rows, of the batch that is drawn."""
    workflow, transfer = program.workload.workflow, program.transfers[number]
    makers = [workflow.producer(key) for key in transfer.keys]
    return transfer.model is None and not any(maker is not None and trains(maker, workflow) for maker in makers)


def part_of(program: Program, part: str) -> Program:
    """The prologue or the epilogue of the program of a step. What it leaves out of the transfers has no messages."""
    if part == STEP:
        return program
    is_prologue = part == PROLOGUE
    kept = [transfer_draws(program, number) == is_prologue for number in range(len(program.transfers))]
    transfers = tuple(
        transfer if keep else replace(transfer, messages=(), reallocation=None)
        for keep, transfer in zip(kept, program.transfers, strict=True)
    )
    instructions = tuple(
        tuple(one for one in some if isinstance(one, Agree) or draws(program, one) == is_prologue)
        for some in program.instructions
    )
    return replace(program, transfers=transfers, instructions=instructions, part=part)
