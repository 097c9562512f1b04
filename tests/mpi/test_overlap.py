"""Overlap is real: slowed calls take as long as the program's critical path says, and less than in one line.

Two ranks, because these tests' ranks share two cores. About 40 s of sleeping.
"""

import copy

import pytest

from bench.overlap import STRATEGIES, judge, measure, write_models

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

    rows = [measure(world, name, folder, with_groups) for name in STRATEGIES]
    judge(rows)
    assert all(row["ok"] for row in rows), rows
    slowed = {row["strategy"]: row["slowed_s"] for row in rows}
    assert slowed == pytest.approx({"flattening": 3.4, "interleaving1": 2.8, "interleaving2": 2.8, "separation": 2.5})
