"""Seconds against closed forms, with constants that are easy to divide by."""

import math
import statistics
from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest

from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.adapters import Adapters
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import ByLength, Calibration, Curve, Device, Layered, Link, Measured
from rlhf_spmd.plan.cost.forecast import forecast, times_of
from rlhf_spmd.plan.cost.forecast_summary import call_s
from rlhf_spmd.plan.cost.lengths import of_forecast
from rlhf_spmd.plan.cost.memory import num_params, sequence_bytes
from rlhf_spmd.plan.cost.seconds import STATE_BYTES, Cost, all_gather_s, head_flops, layer_flops
from rlhf_spmd.plan.cost.simulate import Times
from rlhf_spmd.plan.cost.step_messages import RINGS, Collective
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Program, Run
from rlhf_spmd.plan.program.tensors import numbers_in, weights_of
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.plan.workload import ModelShape, ResponseLengths
from tests.programs import make_workload

SHAPE = ModelShape(8, 64, 176, 8, 4, 8, 512)
LENGTH = 12  # 5 + 7 tokens
MIXTURE = replace(SHAPE, num_experts=6, experts_per_token=2, expert_size=24, num_dense_layers=3)


class Case(NamedTuple):
    program: Program
    times: Times


def machine(**constants) -> Calibration:
    """Returns a machine on which nothing but products takes time, unless told otherwise."""
    device = Device(1e9, 1e30, 1e30, 0.0, 0.0)
    names = {name: constants.pop(name) for name in list(constants) if hasattr(device, name)}
    options = {"inside": Link(1e30, 0.0), "between": Link(1e30, 0.0)} | constants
    return Calibration("test", {"cpu": replace(device, **names)}, provenance="made up", **options)


def example(name: str, size: int, **options) -> Program:
    """Returns the program of a shipped strategy on some ranks."""
    workload, cluster = make_workload(mini_batch=8), Cluster.parse(f"1x{size}")
    return load_strategy(name).compile(workload, cluster, options)


def cost_of(
    calibration: Calibration, size: int = 1, cluster: str = "", train=None, device: str = "cpu", shape=SHAPE, **layout
) -> "Case":
    """Returns the cost of a program with every call in one layout on all ranks.

    train: other options of the calls that train.
    """
    workload = make_workload(mini_batch=8, num_mini_batches=2, shape=shape)
    grid = Layout.grid_of(range(size), **layout)
    layouts = {
        call.name: replace(grid, **train) if train and call.kind == "train" else grid
        for call in workload.workflow.placed_calls
    }
    program = compile_program(workload, Placement(layouts), Cluster.parse(cluster or f"1x{size}", device))
    return Case(program, times_of(program, calibration))


def forward_s(tokens: float, shape: ModelShape = SHAPE) -> float:
    """Returns the seconds of a forward pass of the whole model at 1e9 FLOP/s; tokens of responses have logits."""
    return (shape.num_layers * layer_flops(shape, tokens, LENGTH / 2) + head_flops(shape, tokens * 7 / 12)) / 1e9


def test_flops_of_a_mixture_are_two_per_weight_that_a_token_meets():
    """Its own experts and the router; of a stage, those of its own layers."""
    norms, embedding = (2 * 8 + 1) * 64, 512 * 64
    met = MIXTURE.num_active_params - norms - embedding
    assert 8 * layer_flops(MIXTURE, 3, 0) + head_flops(MIXTURE, 3) == pytest.approx(2 * 3 * met)
    dense, sparse = (layer_flops(MIXTURE, 3, 10, layers=layers) for layers in (range(3), range(3, 8)))
    assert dense == layer_flops(SHAPE, 3, 10)
    assert dense - sparse == 2 * 3 * (3 * 64 * 176 - 64 * 6 - 2 * 3 * 64 * 24)
    assert 4 * layer_flops(MIXTURE, 3, 10, layers=range(4)) == pytest.approx(3 * dense + sparse)


@pytest.mark.parametrize(("size", "layout"), [(1, {}), (2, {"tp": 2}), (2, {"pp": 2})])
def test_a_decode_step_reads_the_experts_that_its_rows_hit(size, layout):
    """A slice has half of those that are hit; each of two stages reads its own."""
    hit = 6 * (1 - (1 - 2 / 6) ** 16)
    table = [(weight, numbers_in(weight.whole)) for weight in weights_of(MIXTURE)]
    numbers = sum(size / (layout.get("tp", 1) if weight.cut else 1) for weight, size in table)
    numbers -= 5 * (6 - hit) * 3 * 64 * 24 / layout.get("tp", 1)
    case = cost_of(machine(), shape=MIXTURE)
    cached = sequence_bytes(
        case.program.workload, case.program.workload.workflow.generate_calls[0], Layout((0,), dp=1), 0
    )
    cached *= 16 * (5 + 3.5) / 12 / layout.get("tp", 1)
    reading = machine(matrix_flops=1e30, memory_bytes_per_s=1.0)
    assert decode_s(reading, size, shape=MIXTURE, **layout) == pytest.approx(2 * numbers + cached)
    of_qwen3_30b = replace(MIXTURE, num_experts=128, experts_per_token=8)
    assert round(of_qwen3_30b.experts_hit(32)) == 112


@pytest.mark.parametrize("recompute", [False, True])
def test_inference_and_training_on_one_device(recompute):
    cost = cost_of(machine(memory_bytes_per_s=1e9), train={"recompute": recompute})
    rows = 16
    assert cost.times.run_s(0, Run("reference_infer")) == pytest.approx(forward_s(rows * LENGTH))
    again_s = SHAPE.num_layers * layer_flops(SHAPE, 8 * LENGTH, LENGTH / 2) / 1e9 if recompute else 0
    expected = 3 * forward_s(8 * LENGTH) + again_s + STATE_BYTES * SHAPE.num_params / 1e9
    assert cost.times.run_s(0, Run("actor_train", mini_batch=0)) == pytest.approx(expected)


def test_counting_experts_takes_a_forward_pass_without_a_head():
    workload, layout = make_workload(shape=MIXTURE), Layout((0,), dp=1)
    call, cluster = workload.workflow.train_call("actor"), Cluster.parse("1x1")
    plain_s, counting_s = (
        Cost(machine(), replace(workload, counted=counted), cluster).pass_s(call, layout, 0, 24, 12, backward=True)
        for counted in (frozenset(), {"actor_train"})
    )
    assert counting_s - plain_s == pytest.approx(8 * layer_flops(MIXTURE, 24, 6) / 1e9)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("zero", [0, 1])
def test_adapters(recompute, zero):
    """Two products more in a pass; no gradients of the base; messages and optimizer steps of adapters alone."""
    shape, link = replace(SHAPE, adapters=Adapters(4, 8.0, ("q_proj", "down_proj"))), Link(1e5, 0.0)
    numbers = SHAPE.num_layers * 4 * ((64 + 64) + (176 + 64))
    own_s = 2 * 8 * LENGTH * numbers / 1e9  # of 8 rows
    calibration = machine(memory_bytes_per_s=1e9, inside=link)
    cost = cost_of(calibration, 2, train={"recompute": recompute, "zero": zero}, shape=shape)
    assert cost.times.run_s(0, Run("reference_infer")) == pytest.approx(forward_s(8 * LENGTH) + own_s)
    layers_s = SHAPE.num_layers * layer_flops(SHAPE, 4 * LENGTH, LENGTH / 2) / 1e9
    passes_s = 2 * forward_s(4 * LENGTH) + recompute * layers_s + (3 + recompute) * own_s / 2
    moved_s = 2 * all_gather_s(link, 2, 4 * numbers)
    update_s = moved_s + all_gather_s(link, 2, 2 * 8) + STATE_BYTES * numbers / (1 + zero) / 1e9
    assert cost.times.run_s(0, Run("actor_train", mini_batch=0)) == pytest.approx(passes_s + update_s)


def test_generation_is_bound_by_its_layers_or_by_memory():
    run, prompts_s = Run("actor_generate"), 0.0
    slow_start = cost_of(machine(matrix_flops=1e30, decode_layer_s=0.25))
    assert slow_start.times.run_s(0, run) == pytest.approx(prompts_s + 7 * SHAPE.num_layers * 0.25)
    cached = 16 * (5 + 3.5) * 2 * 8 * 4 * 8 * 2  # rows, tokens half-way, keys and values, layers, heads, size, bytes
    slow_memory = cost_of(machine(matrix_flops=1e30, memory_bytes_per_s=1e6))
    assert slow_memory.times.run_s(0, run) == pytest.approx(7 * (2 * SHAPE.num_params + cached) / 1e6)


def decode_s(calibration: Calibration, size: int = 1, cluster: str = "", **layout) -> float:
    """Returns the seconds of one step of all 16 rows."""
    case = cost_of(calibration, size, cluster, **layout)
    call, grid = case.program.workload.workflow.call("actor_generate"), case.program.placement.layouts["actor_generate"]
    cost = Cost(calibration, case.program.workload, case.program.cluster)
    return sum(cost.decode_s(call, grid, rank, 16) for rank in grid.stage_ranks(0))


def test_a_decode_step_is_started_read_and_computed():
    """The longest of starting it, reading, and products; all-reduces come on top of the work of the device."""
    free, layers = {"matrix_flops": 1e30}, SHAPE.num_layers
    starts = {"decode_layer_s": 0.25, "decode_reduce_s": 0.5}
    assert decode_s(machine(**free, **starts)) == pytest.approx(layers * 0.25)  # nothing to reduce
    assert decode_s(machine(**free, **starts), 2, tp=2) == pytest.approx(layers * (0.25 + 2 * 0.5))
    assert decode_s(machine(**free, **starts), 4, pp=2, tp=2) == pytest.approx(layers * (0.25 + 2 * 0.5))
    as_graph = machine(**free, **starts, graph_layer_s=0.125)
    assert decode_s(as_graph, 2, tp=2) == pytest.approx(layers * 0.125)
    assert decode_s(machine(graph_layer_s=0.125)) == pytest.approx(decode_s(machine()) + layers * 0.125)
    products_s = (layers * layer_flops(SHAPE, 16, 5 + 3.5) + head_flops(SHAPE, 16)) / 1e9
    assert decode_s(machine()) == pytest.approx(products_s)
    assert decode_s(machine(decode_layer_s=2 * products_s / layers)) == pytest.approx(2 * products_s)


def test_collectives_between_nodes():
    """A ring has the links of all ranks of a node; in an all-to-all each rank sends half of its bytes over its own."""
    calibration = machine(inside=Link(1e9, 0.0), between=Link(1e6, 0.0))
    cost = Cost(calibration, make_workload(mini_batch=8, num_mini_batches=1, shape=SHAPE), Cluster.parse("2x2", "cpu"))
    seconds = {kind: cost.collective_s(Collective(kind, (0, 1, 2, 3), 4e6)) for kind in RINGS}
    assert seconds == {"all-gather": 1.5, "reduce-scatter": 1.5, "all-reduce": 3.0, "all-to-all": pytest.approx(2.0)}
    assert cost.collective_s(Collective("all-to-all", (0, 1), 4e9)) == pytest.approx(2.0)


def test_gradients_cross_the_network_once_for_each_other_node():
    """Of each of 2x2 ranks a quarter of them: the half of a sum that the other node owns, by two ranks at once."""
    free = {"matrix_flops": 1e30, "memory_bytes_per_s": 1e30, "inside": Link(1e30, 0.0), "between": Link(1e6, 0.0)}
    numbers = num_params(SHAPE, Shard())
    for zero, gathered in ((0, 4), (1, 2), (2, 2)):
        case = cost_of(machine(**free), 4, "2x2", train={"zero": zero})
        gathered_s = 3 / 4 * gathered * numbers / 2e6  # in a ring, which has the links of both
        seconds = case.times.run_s(0, Run("actor_train", mini_batch=1))
        assert seconds == pytest.approx(gathered_s + 4 * numbers / 4 / 1e6, rel=1e-3)


def test_zero_3_gathers_and_gradients_are_summed():
    free = {"matrix_flops": 1e30, "inside": Link(1e6, 0.0)}
    params = num_params(SHAPE, Shard())
    half_s = 2 * params / 2 / 1e6  # half of the weights come from the other rank
    sum_s = 2 * 4 * params / 2 / 1e6
    one = cost_of(machine(**free), 2, micro_batch=2)
    assert one.times.run_s(0, Run("reference_infer")) == pytest.approx(0.0, abs=1e-20)
    assert one.times.run_s(0, Run("actor_train", mini_batch=1)) == pytest.approx(sum_s + 8 / 1e6, rel=1e-6)
    three = cost_of(machine(**free), 2, zero=3, micro_batch=2)
    assert three.times.run_s(0, Run("reference_infer")) == pytest.approx(half_s)
    assert three.times.run_s(0, Run("actor_generate")) == pytest.approx(half_s)
    passes = 2  # 4 rows in micro-batches of 2, whose backward passes read what the forward passes gathered
    assert three.times.run_s(0, Run("actor_train", mini_batch=1)) == pytest.approx(
        passes * (half_s + sum_s / 2) + 8 / 1e6, rel=1e-6
    )


def generating(calibration: Calibration, *, lengths=None, drawn=(), num_mini_batches=2, **sizes):
    """Returns when the rows of one rank end, of which there are 8 in a mini-batch.

    drawn: the tokens of each response.
    """
    workload = make_workload(mini_batch=8, num_mini_batches=num_mini_batches, shape=SHAPE)
    workload = replace(workload, forecast_lengths=lengths, **sizes)
    call, layout = workload.workflow.call("actor_generate"), Layout.grid_of(range(1))
    rows = [(5, length) for length in drawn] or [workload.row_lengths] * workload.num_sequences
    cost = Cost(calibration, workload, Cluster.parse("1x1", "cpu"))
    return cost.generate_s(call, layout, 0, rows, workload.max_sequences, num_mini_batches)


@pytest.mark.parametrize("places", [256, 16, 12, 8, 5, 1])
@pytest.mark.parametrize("measured", [False, True])
def test_a_distribution_of_one_length_is_that_length(places, measured):
    """By closed forms and by tables, at the end of every mini-batch that other rows do not hold up."""
    calibration = machine(decode_layer_s=0.25, memory_bytes_per_s=1e7)
    if measured:
        amounts = (1.0, 2.0)
        prefill = ByLength((1.0,), (Layered(Curve(amounts, (2.0, 3.0)), Curve(amounts, (3.0, 3.0))),))
        decode = Layered(Curve(amounts, (0.125, 0.25)), Curve(amounts, (1.0, 1.0)))
        calibration = machine(measured=(table_of(prefill=prefill, decode=decode, ends=Curve(amounts, (0.5, 0.5))),))
    expected = generating(calibration, max_sequences=places)
    assert generating(calibration, max_sequences=places, lengths=ResponseLengths(7)) == expected  # to the bit
    found = generating(calibration, max_sequences=places, lengths=ResponseLengths.of((7,)))
    assert len(found) == len(expected) == 16 and found == sorted(found)
    assert max(found) == pytest.approx(max(expected))
    if places in (256, 16, 8):
        assert found[7] == pytest.approx(max(expected[:8]), rel=0.05)


@pytest.mark.parametrize("places", [64, 24, 8])
def test_expected_seconds_are_those_of_rows_that_are_drawn(places):
    """One number for a distribution is the mean over iterations whose rows are drawn from it."""
    calibration = machine(decode_layer_s=0.25, memory_bytes_per_s=1e7)
    sizes = {"max_response": 400, "max_sequences": places, "num_mini_batches": 8}
    draw = Random(0)
    made = tuple(min(400, max(1, round(100 * math.exp(0.6 * draw.gauss(0, 1))))) for _ in range(100 * 64))
    drawn = [generating(calibration, drawn=made[start::100], **sizes) for start in range(100)]
    of_rows = generating(calibration, lengths=ResponseLengths(statistics.fmean(made), rows=made), **sizes)
    fitted = generating(calibration, lengths=ResponseLengths(statistics.fmean(made), 0.6), **sizes)
    for found in (of_rows, fitted):
        for stop in (16, 32, 64):
            expected = statistics.fmean(max(one[:stop]) for one in drawn)
            assert found[stop - 1] == pytest.approx(expected, rel=0.05), stop
    assert generating(calibration, lengths=ResponseLengths(statistics.fmean(made), 0.6), **sizes) == fitted


@pytest.mark.parametrize("size", [1, 4])
def test_spread_lengths_make_passes_longer(size):
    """By attention on one rank, and on four by the rank with most tokens; a rank waits for no other one's tokens."""
    case = cost_of(machine(), size)
    lengths = {name: ResponseLengths.of(rows) for name, rows in (("one", (4, 4)), ("spread", (1, 7)))}
    found = {}
    for name, one in lengths.items():
        program = replace(case.program, workload=replace(case.program.workload, forecast_lengths=one))
        found[name] = call_s(forecast(program, machine()))
    flops = layer_flops(SHAPE, 16 * 9, 4.5 * (1 + 9 / 81)) - layer_flops(SHAPE, 16 * 9, 4.5)
    more = found["spread"]["reference_infer"] - found["one"]["reference_infer"]
    if size == 1:
        assert more == pytest.approx(SHAPE.num_layers * flops / 1e9)
    else:  # the largest of four sums of four rows of 1 or 7 responses
        surplus = of_forecast(lengths["spread"], 7).surplus(4, 4)
        assert more > found["one"]["reference_infer"] * surplus / (4 * 9)
    for call in ("critic_infer", "actor_train", "critic_train"):
        assert found["spread"][call] > found["one"][call]


def table_of(shape: ModelShape = SHAPE, tp: int = 1, **parts) -> Measured:
    """Makes a table in which a layer of a forward pass takes 1 us for each token, the rest 2; of training ten times as
    long."""
    by_token, ten = (Curve((1.0, 2.0), (s, 2 * s)) for s in (1e-6, 1e-5))
    twice, twenty = (Curve((1.0, 2.0), (2 * s, 4 * s)) for s in (1e-6, 1e-5))
    forward = ByLength((1.0,), (Layered(by_token, twice),))
    train = ByLength((1.0,), (Layered(ten, twenty),))
    return Measured(replace(shape, num_layers=0), tp, 2, forward, train, Curve((1.0, 2.0), (1e-9, 2e-9)), **parts)


def test_what_was_measured_counts_more_than_formulas():
    calibration = machine(measured=(table_of(),), num_workers=1)
    whole_s = (SHAPE.num_layers + 2) * 1e-6
    case = cost_of(calibration)
    assert case.times.run_s(0, Run("reference_infer")) == pytest.approx(16 * LENGTH * whole_s)
    step_s = 8 * LENGTH * 10 * whole_s + 1e-9 * SHAPE.num_params
    assert case.times.run_s(0, Run("actor_train", mini_batch=0)) == pytest.approx(step_s)
    again = cost_of(calibration, train={"recompute": True})
    again_s = 8 * LENGTH * SHAPE.num_layers * 1e-6
    assert again.times.run_s(0, Run("actor_train", mini_batch=0)) == pytest.approx(step_s + again_s)
    critic = replace(SHAPE, scalar_head=True)
    unmeasured = cost_of(machine()).times.run_s(0, Run("critic_infer"))
    assert case.times.run_s(0, Run("critic_infer")) == unmeasured  # its head has not been measured
    both = cost_of(machine(measured=(table_of(), table_of(critic))))
    assert both.times.run_s(0, Run("critic_infer")) == pytest.approx(16 * LENGTH * whole_s)
