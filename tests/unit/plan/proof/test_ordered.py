"""What check passes ends where communicators work in order, whatever the schedule.

Programs with stages, slices, ZeRO and every kind of overlap, on the detailed executor of tests/ordered.py.
"""

import random
from contextlib import suppress
from dataclasses import replace

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.algorithm import load_algorithm
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Post, Program
from rlhf_spmd.plan.program.pipeline import bodies
from rlhf_spmd.plan.proof.deadlock import hangs
from tests.ordered import standing
from tests.programs import SPLIT_SHAPE, errors, make_workload, random_split_program, streaming_with_stages, with_list

SHIPPED = {
    "flattening": ({}, {"zero": 1}),
    "interleaving1": ({},),
    "interleaving2": ({},),
    "separation": tuple(
        {
            "in_flight": in_flight,
            "generation_pp": generation,
            "training_pp": training,
            "training_tp": tp,
            "chain": False,  # test_check_chain.py has iterations in a row
        }
        for in_flight in (1, 2, 3)
        for generation in (1, 2)
        for training, tp in ((1, 1), (2, 1), (2, 2))
    ),
    "reallocation": ({}, {"generation_tp": 2, "training_tp": 1, "training_pp": 2}),
}


def shipped(size: int) -> list[tuple[str, Program]]:
    workload = make_workload(mini_batch=8, num_mini_batches=3, epochs=2, shape=SPLIT_SHAPE)
    cluster = Cluster.parse(f"1x{size}")
    found = []
    for name, choices in SHIPPED.items():
        for options in choices:
            with suppress(UserError):  # too few ranks
                placement = load_strategy(name).place(workload, cluster, **options)
                found.append((f"{name} {options}", compile_program(workload, placement, cluster)))
    return found


def test_one_communicator_for_all_messages_would_hang():
    """A receive that is posted early stands in front of a stage's send; with communicators of their own it does not."""
    rng = random.Random(0)
    hanging = 0
    workload, cluster = make_workload(num_mini_batches=4, shape=SPLIT_SHAPE), Cluster.parse("1x4")
    example = compile_program(workload, streaming_with_stages(workload, cluster), cluster)
    for program in [example, *(program for name, program in shipped(8) if "separation" in name)]:
        assert not errors(program)
        assert not standing(program, rng)
        hanging += bool(standing(program, rng, apart=False))
        assert hanging or program is not example
    assert hanging > 5, hanging


@pytest.mark.parametrize("size", [4, 8])
def test_shipped_strategies_pass_and_end(size):
    rng = random.Random(size)
    for name, program in shipped(size):
        assert not errors(program), name
        assert not standing(program, rng), name


def without(steps: list, place: int) -> list:
    return [*steps[:place], *steps[place + 1 :]]


def twice(steps: list, place: int) -> list:
    return [*steps[: place + 1], *steps[place:]]


@pytest.mark.parametrize("change", [without, twice])
def test_broadcasts_of_episodes_meet_on_all_ranks_of_a_copy(change):
    """The broadcasts of a copy in slices and stages end, and hang, by the proof too, if a rank leaves one out or makes
    one more."""
    workload, cluster, page = make_workload(shape=SPLIT_SHAPE), Cluster.parse("1x4"), load_algorithm("ppo")
    workload = replace(workload, workflow=page.workflow(page.options(), episodes=True))
    placement = load_strategy("reallocation").place(workload, cluster, generation_pp=2, generation_tp=2)
    program, rng = compile_program(workload, placement, cluster), random.Random(0)
    assert not errors(program)
    for call, number, small in bodies(program):
        if call.name != "actor_generate":
            continue
        assert not hangs(small) and not standing(small, rng)
        for rank, steps in enumerate(small.instructions):
            places = [place for place, step in enumerate(steps) if getattr(step, "phase", "") == "answers"]
            assert len(places) == number + 1
            for place in places:
                wrong = with_list(small, rank, change([*steps], place))
                assert hangs(wrong) and standing(wrong, rng)


def found_in(num_programs: int, num_schedules: int, seed: int) -> dict[str, int]:
    """Tries random programs, most with Posts in another order. Returns how many pass, and how many that are refused
    would end."""
    rng = random.Random(seed)
    counts = dict.fromkeys(("passed", "passed with stages", "refused", "refused but ends", "hangs unless connected"), 0)
    while counts["passed"] < num_programs:
        program = random_split_program(rng.choice)
        if rng.random() < 0.6:
            program = reordered(program, rng)
        refused = {finding.message for finding in errors(program)}
        if not refused <= {text for _, _, text in hangs(program)}:
            continue  # something else is wrong with it
        ends = [not standing(program, rng) for _ in range(num_schedules)]
        if not refused:
            assert all(ends), program.placement
            counts["passed"] += 1
            counts["passed with stages"] += any(True for _ in bodies(program))
            counts["hangs unless connected"] += bool(standing(program, rng, connected=False))
        else:
            counts["refused"] += 1
            counts["refused but ends"] += all(ends)
    return counts


def reordered(program: Program, rng: random.Random) -> Program:
    """Returns another order of Posts on one rank: two change places, or one moves."""
    rank = rng.choice(program.cluster.ranks)
    steps = list(program.instructions[rank])
    posts = [place for place, step in enumerate(steps) if isinstance(step, Post)]
    if len(posts) < 2:
        return program
    one, other = rng.sample(posts, 2)
    if rng.random() < 0.5:
        steps[one], steps[other] = steps[other], steps[one]
    else:
        steps.insert(rng.randrange(len(steps)), steps.pop(one))
    return with_list(program, rank, steps)


def test_what_check_passes_ends():
    counts = found_in(40, 3, seed=1)
    assert counts["passed with stages"] > 10 and counts["refused"] > 3, counts


@pytest.mark.slow
def test_both_directions_at_length(capsys):
    """300 programs that pass, each in 20 schedules."""
    counts = found_in(300, 20, seed=2)
    with capsys.disabled():
        print(f"\n{counts}")
    assert counts["passed with stages"] > 75 and counts["refused"] > 25, counts
