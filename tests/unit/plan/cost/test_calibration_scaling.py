"""Calibrations scaled to another machine: each kind of seconds by its own factor, and nothing else."""

from dataclasses import replace

import pytest

from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Link
from rlhf_spmd.plan.cost.calibration_scaling import (
    Scale,
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


def test_the_probed_table_is_small_and_whole_and_generates():
    large = replace(SHAPE, hidden_size=128)
    tables = (table(), drawing_table(tp=2), drawing_table(shape=large), drawing_table())
    assert probed_table(calibration(*tables).devices["cpu"]) is tables[3]
    assert probed_table(calibration(*tables[:2]).devices["cpu"]) is None
    assert probed_table(load_calibration("a100-80g").devices["a100-80g"]) is None
