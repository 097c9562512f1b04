"""Which rank the others wait for, and what each waits for, as a file beside the records."""

import pytest

from rlhf_spmd.plan.program.instructions import Agree, Post, Run, Wait
from rlhf_spmd.runtime.failure.diagnosis import BETWEEN, RankState, WaitGraph, diagnose, late_ranks
from rlhf_spmd.runtime.failure.postmortem import run_status
from rlhf_spmd.runtime.failure.records import NOWHERE
from rlhf_spmd.strategies import flattening, separation
from tests.unit.runtime.failure.test_records import program_of


def standing(program, rank, position, iteration=3, **more):
    step = WaitGraph.of(program).of_rank[rank][position]
    return RankState(rank, "here", f"iteration {iteration}: {step.text}", iteration, position, 5.0, **more)


def find(program, rank, kind, **fields):
    """Returns the first position of an instruction like this in a rank's list."""
    for position, step in enumerate(program.instructions[rank]):
        if isinstance(step, kind) and all(getattr(step, name) == value for name, value in fields.items()):
            return position
    raise AssertionError((rank, kind, fields))


def test_the_rank_that_is_missing_is_named():
    program = program_of(flattening)
    train, reward = find(program, 0, Run, call="actor_train"), find(program, 0, Run, call="reward_infer")
    found = diagnose([standing(program, r, reward if r == 1 else train) for r in range(4)], WaitGraph.of(program))
    assert found.late == (1,) and found.waiting == (0, 2, 3)
    assert found.text.startswith("rank 1 (host here) did not reach iteration 3: Run actor_train epoch 0 mini-batch 0")
    assert "where ranks 0, 2, 3 wait for it; it is in iteration 3: Run reward_infer, instruction " in found.text


def test_whoever_waits_for_a_rank_that_waits_is_not_to_blame():
    """Rank 0 trains on what rank 2 generates, rank 1 trains with rank 0, and rank 3 has done its part."""
    program = program_of(separation)
    steps = WaitGraph.of(program)
    waits = [p for p, step in enumerate(steps.of_rank[0]) if any(rank == 2 for rank, *_ in step.needs)]
    places = {
        0: waits[0],
        1: find(program, 1, Run, call="actor_train"),
        2: find(program, 2, Run, call="actor_generate"),
        3: find(program, 3, Agree),
    }
    found = diagnose([standing(program, rank, places[rank]) for rank in range(4)], steps)
    assert found.late == (2,) and set(found.waiting) >= {0, 3}
    assert "rank 2 (host here) did not reach " in found.text and "Run actor_generate" in found.text


def test_an_earlier_iteration_is_missing_too():
    program = program_of(flattening)
    end = find(program, 0, Agree)
    where = [standing(program, rank, end, iteration=2 if rank == 3 else 3) for rank in range(4)]
    where[0] = RankState(0, "here", "iteration 3: over", 3, NOWHERE, 1.0)  # ahead of all
    found = diagnose(where, WaitGraph.of(program))
    assert found.late == (3,) and found.waiting == (1, 2)


def test_ranks_that_wait_for_one_another():
    program = program_of(flattening)
    actor, critic = find(program, 0, Run, call="actor_train"), find(program, 0, Run, call="critic_train")
    swapped = WaitGraph.of(program).of_rank[1]
    steps = list(swapped)
    steps[actor], steps[critic] = swapped[critic], swapped[actor]
    lists = list(WaitGraph.of(program).of_rank)
    lists[1] = tuple(steps)
    # rank 1 entered the critic's collective where all others entered the actor's
    found = diagnose(
        [RankState(r, "here", f"iteration 3: {lists[r][actor].text}", 3, actor, 5.0) for r in range(4)],
        WaitGraph(tuple(lists)),
    )
    assert found is not None and 1 in (*found.late, *found.waiting)
    assert "rank 1" in found.text and "critic_train" in found.text and "actor_train" in found.text


def test_a_stopped_rank_is_to_blame_wherever_it_stands():
    program = program_of(flattening)
    train = find(program, 0, Run, call="actor_train")
    where = [standing(program, rank, train) for rank in (0, 1, 3)]
    where.append(standing(program, 2, train, trouble="it is stopped (SIGSTOP)"))
    found = diagnose(where, WaitGraph.of(program))
    assert found.late == (2,) and "it is stopped (SIGSTOP)" in found.text


@pytest.mark.parametrize("strategy", [flattening, separation])
def test_the_lists_survive_a_file(strategy, tmp_path):
    program = program_of(strategy)
    graph = WaitGraph.of(program)
    graph.write(tmp_path)
    assert WaitGraph.read(tmp_path) == graph
    assert WaitGraph.read(tmp_path / "nowhere") is None
    for rank in range(4):
        for position, instruction in enumerate(program.instructions[rank]):
            if isinstance(instruction, Wait):  # it needs what its peers have posted
                needs = graph.of_rank[rank][position].needs
                met = Wait if program.transfers[instruction.transfer].reallocation is not None else Post
                assert needs and all(isinstance(program.instructions[other][place], met) for other, place, _ in needs)


def test_in_a_chain_a_sender_waits_for_ranks_of_the_next_iteration():
    """New weights arrive in the list of the next iteration, on ranks that only have a copy."""
    program = program_of(separation)
    graph, weights = WaitGraph.of(program), next(n for n, t in enumerate(program.transfers) if t.model == "critic")
    assert program.chains
    sends = find(program, 0, Wait, transfer=weights)
    rank, place, later = next(need for need in graph.of_rank[0][sends].needs if need[0] > 1)
    assert program.instructions[rank][place] == Wait(weights) and later == 1
    sender = standing(program, 0, sends, iteration=3)
    for reached, late in (((3, BETWEEN - 1), True), ((4, place - 1), True), ((4, place), False), ((5, 0), False)):
        other = RankState(rank, "here", "a text", *reached, 1.0)
        assert late_ranks(graph.of_rank[0][sends].needs, 3, {0: sender, rank: other}) == ((rank,) if late else ())
    receives = graph.of_rank[rank][place].needs  # of the iteration before
    assert (0, sends, -1) in receives
    assert late_ranks(receives, 4, {0: sender}) == () == late_ranks(receives, 4, {0: standing(program, 0, 0, 4)})


def test_a_run_that_its_user_stopped_says_so():
    """It was said to run until its supervisors had been silent for long."""
    assert run_status([], 0.0, "interrupted by SIGINT (reported by rank 1)") == "stopped by SIGINT (Ctrl-C)"
    assert run_status([], 0.0, "other") == "ended by SIGTERM"
