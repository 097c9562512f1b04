"""What an iteration draws and trains where responses take several, against places that are sampled."""

import random
import statistics
from dataclasses import replace

import pytest

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Calibration, Device, Link
from rlhf_spmd.plan.cost.forecast import times_of
from rlhf_spmd.plan.cost.partial import drawing, parts_of
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Run
from rlhf_spmd.plan.workload import ResponseLengths
from rlhf_spmd.strategies import separation
from tests import programs

LENGTHS = tuple(round(random.Random(3).lognormvariate(3.0, 1.0)) + 1 for _ in range(400))


def workload(steps: int, lengths: ResponseLengths | None, limit: int = 160, size: int = 1):
    made = programs.make_workload(mini_batch=64)
    found = replace(made, max_response=limit, partial_steps=steps, forecast_lengths=lengths)
    if size > 1:  # a compute compares the samples of a prompt
        calls = [replace(call, scope="group") if call.kind == "compute" else call for call in made.workflow.calls]
        workflow = replace(made.workflow, calls=tuple(calls))
        found = replace(found, workflow=workflow, samples_per_prompt=size, rollout_batch=made.rollout_batch // size)
    return found


@pytest.mark.parametrize(("steps", "size"), [(7, 1), (20, 4), (64, 2), (159, 1)])
def test_an_iteration_is_that_of_sampled_places(steps, size):
    rng = random.Random(1)
    parts = parts_of(workload(steps, ResponseLengths.of(LENGTHS), size=size))
    drawn, carried, ended, num = [], [], 0, 0
    for _ in range(4000):
        group = [min(rng.choice(LENGTHS), 160) for _ in range(size)]
        for at in range(0, max(group), steps):
            some = [min(steps, length - at) for length in group if length > at]
            drawn, carried, num = drawn + some, carried + [at] * len(some), num + size
        ended += size
    assert parts.ended == pytest.approx(ended / num, rel=0.05)
    assert parts.drawn == pytest.approx(len(drawn) / num, rel=0.05)
    assert parts.carried == pytest.approx(statistics.fmean(carried), rel=0.1, abs=0.2)
    assert statistics.fmean(parts.lengths) == pytest.approx(statistics.fmean(drawn), rel=0.05)
    assert max(parts.lengths) == max(drawn) and min(parts.lengths) >= 1


def test_responses_of_one_length_end_one_after_another():
    """10 tokens in parts of 4, 4 and 2."""
    parts = parts_of(workload(4, None, limit=10))
    assert (parts.ended, parts.drawn, parts.carried) == (pytest.approx(1 / 3), 1.0, pytest.approx(4.0))
    shares = [parts.lengths.count(length) / len(parts.lengths) for length in (2, 4)]
    assert shares == pytest.approx([1 / 3, 2 / 3], abs=0.01)
    assert drawing(workload(4, None, limit=10)).row_lengths == (5 + 4, 3)


def test_a_step_waits_for_no_long_response():
    device, link = Device(1e12, 1e9, 1e9, 1e-5, 1e-3), Link(1e9, 1e-5)
    calibration = Calibration("mine", {"cpu": device}, link, link, provenance="made up")
    cluster = Cluster.parse("1x2")

    def generate_s(steps: int) -> float:
        made = workload(steps, ResponseLengths(30.0, 1.0))
        program = compile_program(made, separation.place(made, cluster, ahead=1), cluster)
        return times_of(program, calibration).run_s(1, Run("actor_generate"))

    assert generate_s(160 // 4) < 0.5 * generate_s(0)


def test_few_rows_that_have_ended_are_not_rounded_up():
    """A Run of four rows, of which a third ends, takes a third of the time where time is a matter of tokens."""
    link = Link(1e9, 1e-5)
    calibration = Calibration("mine", {"cpu": Device(1e9, 1e12, 1e12, 0.0, 0.0)}, link, link, provenance="made up")
    cluster, made = Cluster.parse("1x2"), replace(workload(0, None, limit=10), mini_batch=4, rollout_batch=4)

    def infer_s(steps: int) -> float:
        program = compile_program(replace(made, partial_steps=steps), separation.place(made, cluster, ahead=1), cluster)
        return times_of(program, calibration).run_s(1, Run("reward_infer"))

    assert infer_s(4) == pytest.approx(infer_s(0) / 3, rel=0.01)
