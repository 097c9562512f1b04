"""Overlap is real: slowed calls take as long as the program's critical path says, and less than in one line.

Two ranks, because these tests' ranks share two cores. The calls sleep; in `make test` for a shorter time, under two
strategies, which leaves more to chance and so to the tolerance.
"""

import copy

import pytest

from bench.speed.overlap import ITERATIONS, STRATEGIES, TOLERANCE, judge, measure_all, write_models

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.ranks(2),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]
SLOWED_S = {"flattening": 5.1, "interleaving1": 4.2, "interleaving2": 4.2, "separation": 3.75}


@pytest.fixture(scope="module")
def folder(world, shared_folder):
    if world.rank == 0:
        write_models(shared_folder)
    world.barrier("the models")
    return shared_folder


@pytest.mark.timed
@pytest.mark.parametrize(
    ("strategies", "scale", "iterations", "tolerance"),
    [
        (("flattening", "separation"), 0.4, 3, 0.3),
        pytest.param(STRATEGIES, 1.0, ITERATIONS, TOLERANCE, marks=pytest.mark.slow),
    ],
)
def test_iterations_take_as_long_as_the_critical_path(
    strategies, scale, iterations, tolerance, world, folder, make_group
):
    def with_groups(program):
        placed = copy.copy(world)
        placed._groups = {name: make_group(ranks, name.split()[0]) for name, ranks in program.groups.items()}
        return placed

    rows = measure_all(world, folder, with_groups, strategies, scale=scale, iterations=iterations)
    judge(rows, tolerance)
    assert all(row["ok"] for row in rows), rows
    for row in rows:
        assert row["slowed_s"] == pytest.approx(scale * SLOWED_S[row["strategy"]])
