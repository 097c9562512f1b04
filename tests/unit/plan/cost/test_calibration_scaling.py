"""Calibrations scaled to another machine: each kind of seconds by its own factor, and nothing else."""

from dataclasses import replace

import pytest

from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Calibration, Link
from rlhf_spmd.plan.cost.calibration_scaling import (
    NUM_LAYERS,
    NUM_TOKENS,
    Scale,
    expected,
    probed_table,
    scaled,
)
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.program.instructions import Program
from tests.unit.plan.cost.test_calibration import SHAPE, calibration, line, table

NONE = Scale(1.0, 1.0, 1.0, 2)


def drawing_table(**changes):
    by_length = table().forward
    return replace(table(prefill=by_length, decode=by_length.tables[0], ends=line(1e-3)), **changes)


def seconds_of(found: Calibration) -> dict[str, float]:
    """Returns something of every kind in a calibration of one table."""
    device, one = found.devices["cpu"], found.devices["cpu"].measured[0]
    return {
        "forward": one.forward.at(2, 3.0, 4.0),
        "longer": one.forward.at(2, 3.0, 8.0),
        "matrix": 1 / device.matrix_flops,
        "layer": device.layer_s,
        "train": one.train.at(2, 3.0, 4.0),
        "update": one.update.at(3.0),
        "prefill": one.prefill.at(2, 3.0, 4.0),
        "decode": one.decode.at(2, 3.0),
        "ends": one.ends.at(3.0),
        "decode layer": device.decode_layer_s,
        "reduce": device.decode_reduce_s,
        "memory": 1 / device.memory_bytes_per_s,
    }


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("inference", ("forward", "longer", "matrix", "layer")),
        ("training", ("train", "update")),
        ("generation", ("prefill", "decode", "ends", "decode layer", "reduce", "memory")),
    ],
)
def test_a_factor_is_of_its_kind(kind, names):
    given = calibration(drawing_table())
    before, after = seconds_of(given), seconds_of(scaled(given, "cpu", replace(NONE, **{kind: 3.0})))
    assert {name for name in before if after[name] != pytest.approx(before[name])} == set(names)
    assert all(after[name] == pytest.approx(3 * before[name]) for name in names)


def demo(num_ranks: int) -> Program:
    return load_strategy("flattening").compile(make_workload(load("tiny")), Cluster.parse(f"1x{num_ranks}"), {})


def test_a_machine_of_half_the_speed_takes_twice_as_long():
    """But for messages, which are left out here; and with a half or a quarter of two cores."""
    given, program = replace(load_calibration("cpu-2core"), inside=Link(1e30, 0.0)), demo(4)
    before_s = forecast(program, given).makespan_s
    assert forecast(program, scaled(given, "cpu", Scale(2.0, 2.0, 2.0, 2))).makespan_s == pytest.approx(2 * before_s)
    for num_workers in (1.0, 0.5):
        found_s = forecast(program, scaled(given, "cpu", replace(NONE, num_workers=num_workers))).makespan_s
        assert found_s == pytest.approx(2 / num_workers * before_s)


def test_what_the_table_says_of_the_pieces():
    one = drawing_table()
    rows = [(2, 2), (2, 2)]  # 8 tokens in sequences of 4, prompts of 2
    found = expected(one, rows)
    params = replace(SHAPE, num_layers=NUM_LAYERS).num_params
    assert found.inference == pytest.approx(NUM_LAYERS * 8 + 10)
    assert found.training == pytest.approx(NUM_LAYERS * 8 + 10 + 1e-3 * params)
    assert found.generation == pytest.approx(NUM_LAYERS * 4 + 10 + (NUM_TOKENS - 1) * (NUM_LAYERS * 2 + 10))
    assert found.sum == pytest.approx(found.inference + found.training + found.generation)


def test_the_probed_table_is_small_and_whole_and_generates():
    large = replace(SHAPE, hidden_size=128)
    tables = (table(), drawing_table(tp=2), drawing_table(shape=large), drawing_table())
    assert probed_table(calibration(*tables).devices["cpu"]) is tables[3]
    assert probed_table(calibration(*tables[:2]).devices["cpu"]) is None
    assert probed_table(load_calibration("a100-80g").devices["a100-80g"]) is None
