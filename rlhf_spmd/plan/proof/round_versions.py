"""Proves that rounds of sampling (program/rounds.py) replace rows everywhere before anything else reads them.

The version of rows is the round that made them; of rows that were sent, the one that their sender had at its Post.
Prompts, which every rank has, get theirs by the Agree with which a round begins.
"""

from collections.abc import Iterator

from rlhf_spmd.plan.program.ahead import is_late
from rlhf_spmd.plan.program.instructions import Agree, Post, Program, Run, Wait
from rlhf_spmd.plan.program.rounds import repeated, round_of

Problem = tuple[int, int | None, str]  # rank, position of the instruction, what is wrong with it
Sent = dict[tuple[int, int], dict[str, int]]  # transfer, sender -> versions


def round_problems(program: Program, num: int) -> Iterator[Problem]:
    """Yields the problems of the lists of an iteration with so many rounds."""
    workflow = program.workload.workflow
    made = {key for name in repeated(workflow) for key in workflow.call(name).outputs}
    sent: Sent = {}
    for rank in program.cluster.ranks:
        versions: dict[str, int] = {}
        for step in program.instructions[rank]:
            if isinstance(step, Post):
                sent[step.transfer, rank] = dict(versions)
            elif isinstance(step, Run):
                versions |= dict.fromkeys(program.makes(step, rank), step.round)
    for rank in program.cluster.ranks:
        yield from _of_rank(program, rank, num, made, sent)


def _of_rank(program: Program, rank: int, num: int, made: set[str], sent: Sent) -> Iterator[Problem]:
    """Yields the problems of the list of one rank. made: the keys that rounds make again."""
    workflow, inside = program.workload.workflow, repeated(program.workload.workflow)
    now, under_way = 0, set[int]()
    versions = dict.fromkeys(workflow.given, 0)
    for position, step in enumerate(program.instructions[rank]):
        if isinstance(step, Agree) and step.round:
            if under_way:
                yield (
                    rank,
                    position,
                    f"{step}: transfer {min(under_way)} of rows that may be sampled again is under way",
                )
            now += step.round < num
            versions |= dict.fromkeys(workflow.given, now)
        elif round_of(program, step) not in ((now,) if isinstance(step, Run) and step.call in inside else (0, now)):
            yield rank, position, f"{step} is of round {round_of(program, step) + 1}, and the ranks agreed on {now + 1}"
        if isinstance(step, Post) and made.intersection(program.transfers[step.transfer].keys):
            under_way.add(step.transfer)
        elif isinstance(step, Wait):
            under_way.discard(step.transfer)
            for message in program.transfers[step.transfer].received_by(rank):
                of_sender = sent.get((step.transfer, message.source), {})
                versions |= {key: of_sender.get(key, 0) for key in message.keys if key in made}
        elif isinstance(step, Run) and not is_late(program, step):
            wanted = step.round if step.call in inside else num - 1
            for key in program.reads(step, rank):
                if versions.get(key, wanted) != wanted:
                    text = f"reads {key} of round {versions[key] + 1} instead of {wanted + 1}"
                    yield rank, position, f"{step} {text}"
            versions |= {key: step.round for key in program.makes(step, rank) if key in made}
    old = [key for key in made if versions.get(key, num - 1) != num - 1]
    if old:
        yield rank, None, f"ends with {min(old)} of round {versions[min(old)] + 1} instead of {num}"
