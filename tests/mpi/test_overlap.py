"""Overlap is real: slowed calls take as long as the program's critical path says, and less than in one line.

Two ranks, because these tests' ranks share two cores. About 70 s of sleeping.
"""

import copy

import pytest

from bench.overlap import judge, measure_all, write_models

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]


def test_iterations_take_as_long_as_the_critical_path(world, make_group, tmp_path):
    if world.size != 2:
        pytest.skip("two ranks")
    folder = type(tmp_path)(world.bcast(str(tmp_path), what="the folder"))
    if world.rank == 0:
        write_models(folder)
    world.barrier("the models")

    def with_groups(program):
        placed = copy.copy(world)
        placed._groups = {name: make_group(ranks) for name, ranks in program.groups.items()}
        return placed

    rows = measure_all(world, folder, with_groups)
    judge(rows)
    assert all(row["ok"] for row in rows), rows
    slowed = {row["strategy"]: row["slowed_s"] for row in rows}
    assert slowed == pytest.approx({"flattening": 5.1, "interleaving1": 4.2, "interleaving2": 4.2, "separation": 3.75})
