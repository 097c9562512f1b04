"""Critical paths against closed forms: sums where everything is in one line, maxima where it overlaps."""

import random

import pytest

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.simulate import Times, simulate
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Run
from rlhf_spmd.strategies import flattening, interleaving2, separation
from tests.programs import make_workload, random_program

SECONDS = {
    "actor_generate": 8.0,
    "reference_infer": 4.0,
    "reward_infer": 2.0,
    "critic_infer": 1.0,
    "estimate_advantages": 0.0,
    "actor_train": 0.5,
    "critic_train": 0.25,
}
M = 4  # mini-batches


def program_of(place, size: int, **options):
    workload, cluster = make_workload(num_mini_batches=M, epochs=2, mini_batch=8), Cluster.parse(f"1x{size}")
    return compile_program(workload, place(workload, cluster, **options), cluster)


def seconds(program):
    """Returns the seconds of a call: it takes its time for all mini-batches, whatever the number of rows; a train step
    its own."""

    def run_s(rank: int, step: Run) -> float:
        train = step.call.endswith("_train")
        return SECONDS[step.call] * (1 if train else len(program.mini_batches_of(step)) / M)

    return run_s


def forecast(place, size: int, **options) -> float:
    program = program_of(place, size, **options)
    return simulate(program, Times(seconds(program))).makespan_s


@pytest.mark.parametrize("size", [1, 2, 4])
def test_flattening_is_a_sum(size):
    assert forecast(flattening.place, size) == pytest.approx(8 + 4 + 2 + 1 + 2 * M * 0.75)


@pytest.mark.parametrize("size", [2, 4])
def test_interleaving_runs_reference_and_reward_at_the_same_time(size):
    assert forecast(interleaving2.place, size) == pytest.approx(8 + max(4, 2) + 1 + 2 * M * 0.75)


def test_separation_overlaps_generation_with_the_first_epoch():
    """On two ranks a mini-batch takes 15/4 s to make and 0.75 s to train on: only the last one's training is seen."""
    assert forecast(separation.place, 2) == pytest.approx(15 + 0.75 + M * 0.75)


def test_messages_take_their_time_and_slow_ranks_hold_up_their_group():
    program = program_of(separation.place, 2)
    weights = sum(1 for transfer in program.transfers if transfer.model)
    slow = simulate(program, Times(seconds(program), lambda message: 0.0 if message.keys else 10.0))
    assert weights == 2
    assert slow.makespan_s == pytest.approx(simulate(program, Times(seconds(program))).makespan_s + 10.0 * weights)
    program = program_of(flattening.place, 2)
    late = simulate(program, Times(lambda rank, step: float(rank == 1 and step.call == "actor_generate")))
    assert late.makespan_s == 1.0 and late.times[0][0] == (0.0, 0.0)


@pytest.mark.parametrize("seed", range(30))
def test_any_program_ends_and_takes_between_the_longest_rank_and_the_sum(seed):
    program = random_program(random.Random(seed).choice)
    found = simulate(program, Times(lambda rank, step: 1.0))
    work = [sum(isinstance(step, Run) for step in steps) for steps in program.instructions]
    assert max(work) <= found.makespan_s <= sum(work)
    for spans in found.times:
        assert all(begin <= end for begin, end in spans)
        assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:], strict=False))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_ranks_share_the_cores_of_their_node(workers):
    """Four ranks compute alone; with c cores for them, each gets c / 4."""
    program = program_of(flattening.place, 4)
    found = simulate(
        program, Times(lambda rank, step: float(step.call == "actor_generate"), num_workers=lambda n: workers)
    )
    assert found.makespan_s == pytest.approx(4 / workers)


def test_a_rank_sends_one_message_after_the_other():
    """Under separation on two ranks every mini-batch's messages leave from the same rank."""
    program = program_of(separation.place, 2)
    none = {"actor_generate": 0.0}
    found = simulate(program, Times(lambda rank, step: none.get(step.call, 0.0), lambda m: 1.0 if m.keys else 0.0))
    messages = sum(len(transfer.messages) for transfer in program.transfers if not transfer.model)
    assert found.makespan_s == pytest.approx(messages)
