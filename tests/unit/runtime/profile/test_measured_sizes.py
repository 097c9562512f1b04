"""The sizes that a profile measures."""

import pytest

from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.runtime.profile.measured_sizes import Grid, rows_up_to


def test_the_grid_holds_what_calls_may_meet():
    workload = make_workload(presets.load("tiny"))
    grid = Grid.of(workload, 4, 4)
    assert grid.tps == (1, 2)  # of two key-value heads
    assert Grid.of(workload, 3, 3).tps == (1,)
    assert rows_up_to(32) == (1, 4, 16, 32) and rows_up_to(1) == (1, 2) and rows_up_to(16) == (1, 4, 16)
    assert set(grid.rows(1.0, 9)) == {(32, 24)}
    rows = grid.rows(0.5, 100)
    for index, most in enumerate((32, 24)):
        column = [row[index] for row in rows]
        assert sum(column) / 100 == pytest.approx(most / 2, rel=0.02)
        assert min(column) >= most / 6 - 1 and max(column) <= most * 5 / 6 + 1
    assert len(set(rows)) > 50
