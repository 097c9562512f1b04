"""Proves how old tokens are, in iterations, when they train, where a response takes several (Workload.partial_steps).

What a call that samples reads follows from the lists of its ranks: the weights whose arrival, or training, was last.
A response is sampled in `num_parts` iterations in a row at most, and the last of these is that of its batch.
"""

from collections.abc import Iterator

from rlhf_spmd.plan.calls import Train
from rlhf_spmd.plan.program.chain import in_a_row
from rlhf_spmd.plan.program.instructions import Program, Run, Wait

NUM_STEPS = 3  # after which steps repeat themselves
Problem = tuple[int, int | None, str]  # rank, position of the instruction, what is wrong with it


def most(program: Program) -> int:
    """Returns how many iterations old a token is at most by the options."""
    return program.placement.ahead + program.workload.num_parts - 1


def lag_problems(program: Program) -> Iterator[Problem]:
    """Yields the calls that sample a token with older weights."""
    for call in program.workload.workflow.generate_calls if program.workload.partial_steps else ():
        for rank in program.placement.layouts[call.name].ranks:
            newest = -1  # the iteration that made the weights that are here; -1: none
            for position, iteration, step in in_a_row(program, rank, NUM_STEPS):
                if isinstance(step, Wait) and program.transfers[step.transfer % len(program.transfers)].model:
                    newest = _of_transfer(program, step, call.model, newest)
                elif isinstance(step, Run) and step.call == call.name:
                    lag = iteration - 1 - newest + program.workload.num_parts - 1
                    if lag > most(program):
                        text = f"samples tokens that train {lag} iterations later, which is more than {most(program)}"
                        yield rank, position, f"{step} {text}"
                elif isinstance(step, Run):
                    other = program.workload.workflow.call(step.call)
                    newest = iteration if isinstance(other, Train) and other.model == call.model else newest


def _of_transfer(program: Program, step: Wait, model: str, newest: int) -> int:
    """Returns the iteration of the weights of a model after a Wait."""
    iteration, number = divmod(step.transfer, len(program.transfers))
    return max(newest, iteration) if program.transfers[number].model == model else newest
