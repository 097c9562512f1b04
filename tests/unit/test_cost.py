"""Seconds against closed forms, with constants that are easy to divide by."""

from dataclasses import replace
from typing import NamedTuple

import pytest

from rlhf_spmd.calibration_file import read_calibration
from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.calibration import Calibration, Device, Link
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.compile import compile_program
from rlhf_spmd.plan.cost import STATE_BYTES, all_gather_s, decode_steps, head_flops, layer_flops
from rlhf_spmd.plan.forecast import forecast, times_of
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.memory import num_params
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program import Load, Program, Run
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.plan.simulate import Times, simulate
from rlhf_spmd.plan.workload import ModelShape
from tests.programs import make_workload

SHAPE = ModelShape(8, 64, 176, 8, 4, 8, 512)
LENGTH = 12  # 5 + 7 tokens


class Case(NamedTuple):
    program: Program
    times: Times


def machine(**constants) -> Calibration:
    """Nothing but products takes time, unless told otherwise."""
    device = Device(1e9, 1e30, 1e30, 0.0, 0.0)
    names = {name: constants.pop(name) for name in list(constants) if hasattr(device, name)}
    options = {"inside": Link(1e30, 0.0), "between": Link(1e30, 0.0)} | constants
    return Calibration("test", {"cpu": replace(device, **names)}, provenance="made up", **options)


def cost_of(
    calibration: Calibration, size: int = 1, cluster: str = "", train=None, device: str = "cpu", **layout
) -> "Case":
    """Every call in one layout on all ranks; train: other options of the calls that train."""
    workload = make_workload(mini_batch=8, num_mini_batches=2, shape=SHAPE)
    grid = Layout.grid_of(range(size), **layout)
    layouts = {
        call.name: replace(grid, **train) if train and call.kind == "train" else grid
        for call in workload.workflow.placed_calls
    }
    program = compile_program(workload, Placement(layouts), Cluster.parse(cluster or f"1x{size}", device))
    return Case(program, times_of(program, calibration))


def forward_s(tokens: float, shape: ModelShape = SHAPE) -> float:
    """Of the whole model at 1e9 FLOP/s."""
    return (shape.num_layers * layer_flops(shape, tokens, LENGTH / 2) + head_flops(shape, tokens)) / 1e9


def test_flops_are_two_per_weight_and_token():
    norms = (2 * SHAPE.num_layers + 1) * SHAPE.hidden_size
    weights = SHAPE.num_params - norms - SHAPE.vocab_size * SHAPE.hidden_size  # the embedding is looked up
    assert SHAPE.num_layers * layer_flops(SHAPE, 3, 0) + head_flops(SHAPE, 3) == 2 * 3 * weights
    # scores and mixing: 2 products of 2 FLOPs for each number of a query and token that it sees
    assert layer_flops(SHAPE, 3, 10) - layer_flops(SHAPE, 3, 0) == 3 * 10 * 2 * 2 * 64
    assert head_flops(replace(SHAPE, scalar_head=True), 3) == 2 * 3 * 64


def test_all_gather():
    assert all_gather_s(Link(100.0, 0.5), 1, 800.0) == 0.0
    assert all_gather_s(Link(100.0, 0.5), 4, 800.0) == pytest.approx(3 / 4 * 8.0 + 3 * 0.5)


@pytest.mark.parametrize("recompute", [False, True])
def test_inference_and_training_on_one_device(recompute):
    cost = cost_of(machine(memory_bytes_per_s=1e9), train={"recompute": recompute})
    rows = 16
    assert cost.times.run_s(0, Run("reference_infer")) == pytest.approx(forward_s(rows * LENGTH))
    again_s = SHAPE.num_layers * layer_flops(SHAPE, 8 * LENGTH, LENGTH / 2) / 1e9 if recompute else 0
    expected = 3 * forward_s(8 * LENGTH) + again_s + STATE_BYTES * SHAPE.num_params / 1e9
    assert cost.times.run_s(0, Run("actor_train", mini_batch=0)) == pytest.approx(expected)


def test_each_pass_starts_its_layers():
    cost = cost_of(machine(layer_s=0.5), micro_batch=2)
    assert cost.times.run_s(0, Run("reference_infer")) == pytest.approx(
        forward_s(16 * LENGTH) + 8 * SHAPE.num_layers * 0.5
    )


def test_tensor_parallelism_divides_products_and_adds_messages():
    cost = cost_of(machine(inside=Link(1e6, 0.0), between=Link(1e3, 0.0)), 2, tp=2, micro_batch=16)
    moved = 4 * SHAPE.num_layers * (1 / 2) * 16 * LENGTH * 64 * 2
    run = Run("reference_infer")
    assert cost.times.run_s(1, run) == pytest.approx(forward_s(16 * LENGTH) / 2 + moved / 1e6)
    apart = cost_of(machine(inside=Link(1e6, 0.0), between=Link(1e3, 0.0)), 2, "2x1", tp=2, micro_batch=16)
    assert apart.times.run_s(1, run) == pytest.approx(forward_s(16 * LENGTH) / 2 + moved / 1e3)


def test_generation_is_bound_by_its_layers_or_by_memory():
    run, prompts_s = Run("actor_generate"), 0.0
    slow_start = cost_of(machine(matrix_flops=1e30, decode_layer_s=0.25))
    assert slow_start.times.run_s(0, run) == pytest.approx(prompts_s + 7 * SHAPE.num_layers * 0.25)
    cached = 16 * (5 + 3.5) * 2 * 8 * 4 * 8 * 2  # rows, tokens half-way, keys and values, layers, heads, size, bytes
    slow_memory = cost_of(machine(matrix_flops=1e30, memory_bytes_per_s=1e6))
    assert slow_memory.times.run_s(0, run) == pytest.approx(7 * (2 * SHAPE.num_params + cached) / 1e6)


@pytest.mark.parametrize("pipelined", [False, True])
def test_prompts_pass_the_stages(pipelined):
    cost = cost_of(machine(pipelined_prefill=pipelined), 4, pp=4)
    layers_s = SHAPE.num_layers / 4 * layer_flops(SHAPE, 16 * 5, 2.5) / 1e9
    head_s = head_flops(SHAPE, 16 * 5) / 1e9
    expected = 4 * layers_s + head_s
    if pipelined:  # quarters; the last stage, which has the head, takes longest
        expected = (expected + 3 * (layers_s + head_s)) / 4
    assert cost.times.run_s(0, Run("actor_generate")) == pytest.approx(expected)


@pytest.mark.parametrize(("num_stages", "size"), [(2, 1), (4, 2), (4, 8)])
def test_bubbles_come_out_of_the_schedule(num_stages, size):
    """1F1B of m micro-batches through p equal stages takes (m + p - 1) forwards and backwards of a stage."""
    cost = cost_of(machine(layer_s=1.0, matrix_flops=1e30), num_stages, pp=num_stages, micro_batch=size)
    found = simulate(cost.program, cost.times)
    spans = [
        span
        for steps, times in zip(found.program.instructions, found.times, strict=True)
        for step, span in zip(steps, times, strict=True)
        if isinstance(step, Run) and (step.call, step.mini_batch) == ("actor_train", 1)
    ]
    took_s = max(end for _, end in spans) - min(begin for begin, _ in spans)
    assert took_s == pytest.approx((8 // size + num_stages - 1) * 3 * SHAPE.num_layers / num_stages)


def test_zero_3_gathers_and_gradients_are_summed():
    free = {"matrix_flops": 1e30, "inside": Link(1e6, 0.0)}
    params = num_params(SHAPE, Shard())
    half_s = 2 * params / 2 / 1e6  # half of the weights come from the other rank
    sum_s = 2 * 4 * params / 2 / 1e6
    one = cost_of(machine(**free), 2, micro_batch=2)
    assert one.times.run_s(0, Run("reference_infer")) == pytest.approx(0.0, abs=1e-20)
    assert one.times.run_s(0, Run("actor_train", mini_batch=1)) == pytest.approx(sum_s, rel=1e-6)
    three = cost_of(machine(**free), 2, zero=3, micro_batch=2)
    assert three.times.run_s(0, Run("reference_infer")) == pytest.approx(half_s)
    assert three.times.run_s(0, Run("actor_generate")) == pytest.approx(half_s)
    passes = 2 * 2  # 4 rows in micro-batches of 2, forward and backward
    assert three.times.run_s(0, Run("actor_train", mini_batch=1)) == pytest.approx(passes * half_s + sum_s, rel=1e-6)


def test_weights_from_host_memory():
    workload = make_workload(mini_batch=8, num_mini_batches=2, shape=SHAPE)
    everyone = Layout.data_parallel(range(1))
    placement = Placement.by_model(
        workload, actor=everyone, critic=everyone, reference=replace(everyone, offload=True), reward=everyone
    )
    program = compile_program(workload, placement, Cluster.parse("1x1"))
    cost = Case(program, times_of(program, machine(matrix_flops=1e30, host_bytes_per_s=1e6)))
    assert cost.times.load_s(0, Load("reference")) == pytest.approx(2 * SHAPE.num_params / 1e6)
    found = simulate(cost.program, cost.times)
    assert found.makespan_s == pytest.approx(2 * SHAPE.num_params / 1e6)


def test_places_are_refilled():
    """Rows 0 and 1 begin; row 2 takes the place of the shorter one."""
    assert list(decode_steps([2, 5, 4], places=2)) == [(2, 2, [0]), (3, 2, [1]), (1, 1, [2])]
    assert list(decode_steps([3, 3, 3], places=2)) == [(3, 2, [0, 1]), (3, 1, [2])]
    assert list(decode_steps([], places=2)) == []


def test_stragglers_come_from_a_distribution_of_lengths():
    """Two ranks with the same number of rows: the longest response of all decides."""
    cost = cost_of(machine(matrix_flops=1e30, decode_layer_s=0.25), 2)
    workload = replace(cost.program.workload, response_lengths=(1, 2, 7))
    program = replace(cost.program, workload=workload)
    longest = max(workload.lengths(row)[1] for row in range(16))
    assert forecast(program, machine(matrix_flops=1e30, decode_layer_s=0.25)).makespan_s == pytest.approx(
        longest * SHAPE.num_layers * 0.25
    )
    assert {workload.lengths(row)[1] for row in range(16)} == {1, 2, 7}


def test_an_unknown_type_of_device_is_refused():
    with pytest.raises(UserError, match="calibration test does not know devices of type h100-80g, only cpu"):
        cost_of(machine(), 1, device="h100-80g")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not JSON"),
        ('{"version": 0}', "version 0"),
        ('{"version": 1, "provenance": "none", "devices": {}}', "devices"),
        ("[]", "it: "),
    ],
)
def test_bad_calibrations_are_refused_by_name(tmp_path, content, says):
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(UserError, match=rf"mine\.json.*{says}"):
        read_calibration(str(path))
    with pytest.raises(UserError, match="nowhere"):
        read_calibration(str(tmp_path / "nowhere.json"))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("actor_b,", "actors,", "lacks columns: actor_b"),
        ("scale_actor,13,", "scale_actor,12,", "line 6: no model of 12 billion"),
        (",31.3\n", ",soon\n", "line 4: could not convert"),
        ("512,8,ReaL-Heuristic", "512,12,ReaL-Heuristic", "line 4: .* multiple of 8"),
    ],
)
def test_bad_rows_are_refused_by_line(tmp_path, old, new, says):
    from bench.validate import DATA, read_rows

    path = tmp_path / "rows.csv"
    path.write_text((DATA / "realhf_v1_scale_actor.csv").read_text().replace(old, new))
    with pytest.raises(UserError, match=rf"rows\.csv.*{says}"):
        read_rows(path)


def test_the_published_rows_come_out():
    """The smallest and a large one of ReaL-Heuristic, within the promised 12%."""
    from bench.validate import DATA, forecast_s, read_rows

    calibration = read_calibration(str(DATA / "real_v1.json"))
    rows = [row for row in read_rows(DATA / "realhf_v1_scale_actor.csv") if row["system"] == "ReaL-Heuristic"]
    assert len(rows) == 12
    for row in (rows[0], rows[6]):
        assert forecast_s(row, calibration) == pytest.approx(float(row["sec_per_iter"]), rel=0.12)
