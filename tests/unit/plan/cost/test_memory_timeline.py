"""Bytes over time against the bytes that `check` counts, and against sums by hand."""

import random

import pytest

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.memory import (
    activation_bytes,
    cache_bytes,
    num_params,
    peak_bytes,
    static_bytes,
    working_bytes,
)
from rlhf_spmd.plan.cost.memory_timeline import held, most_bytes
from rlhf_spmd.plan.cost.simulate import Forecast, Times, simulate
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Program, Run
from rlhf_spmd.strategies import flattening, reallocation
from tests.programs import make_workload, random_program


def forecast(program: Program) -> Forecast:
    """A second for every Run and message."""
    return simulate(program, Times(lambda rank, step: 1.0, lambda message: 1.0, lambda rank, step: 1.0))


def compiled(place, size: int, **options) -> Program:
    workload, cluster = make_workload(mini_batch=4, epochs=2), Cluster.parse(f"1x{size}")
    return compile_program(workload, place(workload, cluster, **options), cluster)


def peak(program: Program, rank: int) -> int:
    return peak_bytes(static_bytes(program, rank), working_bytes(program, rank))


def at(steps, moment: float) -> int:
    return [size for begin_s, size in steps if begin_s <= moment][-1]


@pytest.mark.parametrize("seed", range(60))
def test_never_more_than_check_counts(seed):
    found = forecast(random_program(random.Random(seed).choice))
    for rank in found.program.cluster.ranks:
        steps = held(found, rank)
        assert max(size for _, size in steps) <= peak(found.program, rank)
        assert steps[0][0] == 0.0 and [begin_s for begin_s, _ in steps] == sorted({begin_s for begin_s, _ in steps})
        static = static_bytes(found.program, rank)
        assert steps[-1][1] == sum(static.values()) - static["offloaded"]  # everything has gone


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_peak_is_what_check_counts_where_nothing_overlaps(zero, size):
    found = forecast(compiled(flattening.place, size, zero=zero))
    for rank in range(size):
        assert max(size for _, size in held(found, rank)) == peak(found.program, rank)
    assert most_bytes(found) == max(peak(found.program, rank) for rank in range(size))


def test_each_call_holds_its_own():
    program = compiled(flattening.place, 1)
    found, workload = forecast(program), program.workload
    steps, static = held(found, 0), sum(static_bytes(program, 0).values())
    layout = program.placement.layouts["actor_train"]
    for step, (begin_s, end_s) in zip(found.program.instructions[0], found.times[0], strict=True):
        if isinstance(step, Run):
            call = workload.workflow.call(step.call)
            besides = {"generate": cache_bytes, "train": activation_bytes}.get(call.kind)
            expected = besides(workload, call, layout, 0) if besides else 0
            assert at(steps, (begin_s + end_s) / 2) - static == expected, step


def test_a_training_step_in_stages_holds_its_activations_to_its_update():
    found = forecast(compiled(reallocation.place, 2, training_pp=2, training_tp=1, inference_pp=1))
    program = found.program
    call, layout = program.workload.workflow.call("actor_train"), program.placement.layouts["actor_train"]
    for rank in (0, 1):
        times = [
            times
            for step, times in zip(program.instructions[rank], found.times[rank], strict=True)
            if isinstance(step, Run) and step.call == "actor_train" and (step.epoch, step.mini_batch) == (0, 0)
        ]
        static = static_bytes(program, rank)
        inside = at(held(found, rank), (times[0][0] + times[-1][1]) / 2) - sum(static.values())
        assert inside == activation_bytes(program.workload, call, layout, rank) > 0


def test_an_offloaded_model_comes_and_goes():
    program = compiled(reallocation.place, 2, offload=True, training_tp=1)
    found = forecast(program)
    steps = held(found, 0)
    static = static_bytes(program, 0)
    stays = sum(static.values()) - static["offloaded"]
    when = {
        step.call: (begin_s + end_s) / 2
        for step, (begin_s, end_s) in zip(found.program.instructions[0], found.times[0], strict=True)
        if isinstance(step, Run)
    }
    for call, model in (("reference_infer", "reference"), ("reward_infer", "reward")):
        layout = program.placement.layouts[call]
        weights = 2 * num_params(program.workload.models[model], layout.shard(0))
        assert at(steps, when[call]) - stays == weights
    assert at(steps, when["critic_infer"]) == stays


def test_weights_on_their_way_hold_buckets():
    """The actor trains on one rank and generates on another: its weights travel at the end."""
    workload, cluster = make_workload(), Cluster.parse("1x2")
    calls = [call.name for call in workload.workflow.placed_calls]
    layouts = dict.fromkeys(calls, Layout.grid_of((0,))) | {"actor_generate": Layout.grid_of((1,))}
    program = compile_program(workload, Placement(layouts), cluster)
    assert working_bytes(program, 1)["buckets"] > 0
    slow = simulate(program, Times(lambda rank, step: 1.0, lambda message: 1.0))
    last = held(slow, 1)[-2]
    assert last[1] - sum(static_bytes(program, 1).values()) == working_bytes(program, 1)["buckets"]
    # it generates for a second, and waits for the buckets until everything is over
    assert held(slow, 1)[-1][0] == pytest.approx(slow.makespan_s)
