"""The 1F1B schedule: its passes against the definition, its time against the closed form, its bodies against hangs."""

from dataclasses import replace

import pytest

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.simulate import Times, simulate
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program import pipeline
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Post, Program, Run, Wait
from rlhf_spmd.plan.program.pipeline import bodies, expand, global_order, largest_number
from rlhf_spmd.plan.proof.deadlock import hangs
from tests.programs import SHAPE, errors, make_workload

GRIDS = [(stages, m) for stages in (2, 3, 4, 6) for m in (1, 2, 3, 5, 8)]


def program_of(
    pp: int, *, tp: int = 1, dp: int = 1, mini_batch: int = 8, generation: dict | None = None, **options
) -> Program:
    """Returns the program of all models in stages; one mini-batch.

    generation: its grid, if not data-parallel.
    """
    shape = replace(SHAPE, num_layers=6, num_kv_heads=2)
    workload = make_workload(mini_batch=mini_batch, num_mini_batches=1, shape=shape)
    ranks = range(pp * tp * dp)
    layout = Layout.grid_of(ranks, pp=pp, tp=tp, **options)
    generated = Layout.grid_of(ranks, **generation) if generation else Layout.data_parallel(ranks)
    calls = workload.workflow.placed_calls
    placement = Placement({c.name: generated if c.kind == "generate" else layout for c in calls})
    return compile_program(workload, placement, Cluster.parse(f"1x{len(ranks)}"))


@pytest.mark.parametrize(("stages", "m"), GRIDS)
def test_the_global_order_holds_what_each_pass_needs(stages, m):
    order = global_order(stages, m, train=True)
    place = {key: index for index, key in enumerate(order)}
    assert len(place) == 2 * stages * m
    for stage, (kind, index) in order:
        before = stage - 1 if kind == "forward" else stage + 1
        if 0 <= before < stages:
            assert place[before, (kind, index)] < place[stage, (kind, index)]


@pytest.mark.parametrize(("stages", "m"), GRIDS)
def test_a_step_takes_as_long_as_the_closed_form(stages, m):
    """(m + p - 1) (f + b): m micro-batches through one stage, and the fill and drain of the others."""
    program = program_of(stages, mini_batch=8, tokens=5)
    (step,) = {s for steps in program.instructions for s in steps if isinstance(s, Run) and s.call == "actor_train"}
    alone = replace(program, transfers=(), instructions=((step,),) * stages)
    forward_s, backward_s = 1.0, 2.0
    found = simulate(
        alone,
        Times(lambda rank, run: {"forward": forward_s, "backward": backward_s}.get(run.phase, 0.0)),
        num_micro_batches=lambda run: m,
    )
    assert found.makespan_s == pytest.approx((m + stages - 1) * (forward_s + backward_s))


@pytest.mark.parametrize(("pp", "tp", "dp"), [(2, 1, 1), (4, 1, 1), (2, 2, 2), (3, 2, 1)])
def test_no_body_can_hang_whatever_the_number_of_micro_batches(pp, tp, dp):
    program = program_of(pp, tp=tp, dp=dp, tokens=5)
    assert errors(program) == []
    numbers: dict[str, list[int]] = {}
    for call, number, small in bodies(program):
        numbers.setdefault(call.name, []).append(number)
        assert hangs(small) == []
        posts = sum(isinstance(step, Post) for steps in small.instructions for step in steps)
        assert posts == sum(isinstance(step, Wait) for steps in small.instructions for step in steps)
    for number in range(1, 4 * pp):  # also those that others stand for, inside the whole iteration
        assert hangs(expand(program, lambda step, number=number: number)) == []
    rows = -(-program.workload.mini_batch // dp)  # a budget may leave one row to each
    expected = sorted({min(number, rows) for number in (1, 2, pp, pp + 1, 2 * pp + 1, rows)})
    assert numbers["actor_train"] == numbers["reference_infer"] == expected
    call = program.workload.workflow.call("actor_train")
    whole = replace(program.placement.layouts["actor_train"], tokens=None, micro_batch=3)
    assert largest_number(whole, program.workload, call) == -(-rows // 3)


def test_the_body_of_a_delayed_run_is_delayed():
    """One iteration ahead, training belongs to the batch before, with all its passes and messages between stages."""
    program = program_of(2)
    lists = tuple(
        tuple(replace(step, delay=1) if getattr(step, "call", "") == "actor_train" else step for step in steps)
        for steps in program.instructions
    )
    grown = expand(replace(program, instructions=lists), lambda step: 3)
    for before, steps in zip(expand(program, lambda step: 3).instructions, grown.instructions, strict=True):
        train = [number for number, step in enumerate(before) if getattr(step, "call", "") == "actor_train"]
        delays = [step.delay for step in steps]
        assert min(delays[train[0] : train[-1] + 1]) == 1 and sum(delays[: train[0]]) == 0


def test_a_schedule_that_hangs_is_refused_by_name(monkeypatch):
    """A first stage that wants the gradients before it has sent the activations which they follow from."""
    real = pipeline.body

    def broken(*arguments):
        body = real(*arguments)
        first = min(body.instructions)
        steps = sorted(body.instructions[first], key=lambda step: not isinstance(step, Wait))
        return replace(body, instructions=body.instructions | {first: tuple(steps)})

    monkeypatch.setattr(pipeline, "body", broken)
    found = [finding.message for finding in errors(program_of(2, tokens=5))]
    assert any(text.startswith("actor_train with 1 micro-batches: ") and "waits for ever" in text for text in found)


@pytest.mark.parametrize(("pp", "tp", "dp"), [(2, 1, 1), (3, 1, 2), (2, 2, 2)])
def test_pipelines_at_once_are_pipelines_step_by_step(pp, tp, dp):
    """Devices that are shared, by more workers than there are ranks, are simulated instruction by instruction."""
    program = program_of(pp, tp=tp, dp=dp)

    def run_s(rank: int, run: Run) -> float:
        if run.phase == "begin":  # only says that a step begins
            return 0.0
        return 1.0 + rank % 3 + (run.micro_batch or 0) * 0.25 + (run.phase == "backward")

    at_once = simulate(program, Times(run_s, lambda message: 0.125))
    one_by_one = simulate(program, Times(run_s, lambda message: 0.125, num_workers=lambda node: 100))
    assert at_once.program == one_by_one.program
    assert at_once.makespan_s == pytest.approx(one_by_one.makespan_s)
    for fast, slow in zip(at_once.times, one_by_one.times, strict=True):
        for one, other in zip(fast, slow, strict=True):
            assert one == pytest.approx(other)
