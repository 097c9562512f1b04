"""Overlap is real: slowed calls take as long as the program's critical path says, and less than in one line.

Two ranks, because these tests' ranks share two cores, and four for a chain of iterations. The calls sleep; in `make
test` for a shorter time, under two strategies, which leaves more to chance and so to the tolerance.
"""

import copy

import pytest

from bench.speed.overlap import (
    GAINS,
    ITERATIONS,
    LARGE_CRITIC,
    STRATEGIES,
    TOLERANCE,
    judge,
    measure,
    measure_all,
    write_models,
)

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.ranks(2),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]
SLOWED_S = {"flattening": 5.1, "interleaving1": 4.2, "interleaving2": 4.2, "separation": 3.75}
CHAIN = "four ranks in a chain"
SLOWED_S |= {GAINS[CHAIN][0]: 6.875, CHAIN: 4.925}


@pytest.fixture(scope="module")
def folder(written):
    return written(write_models)


@pytest.fixture
def with_groups(world, make_group):
    """Returns with_groups(program), which is the world with the groups of a program."""

    def placed(program):
        placed = copy.copy(world)
        placed._groups = {name: make_group(ranks, name.split()[0]) for name, ranks in program.groups.items()}
        return placed

    return placed


@pytest.mark.ranks(4)
def test_a_chain_is_drained(world, folder, with_groups):
    row = measure(world, CHAIN, folder, with_groups, dict.fromkeys(LARGE_CRITIC, 0.0), scale=0.01, iterations=2)
    assert 0.04 < row["slowed_s"] == row["forecast_s"] < row["measured_s"]


@pytest.mark.timed
@pytest.mark.parametrize(
    ("strategies", "scale", "iterations", "tolerance"),
    [
        (("flattening", "separation"), 0.4, 3, 0.3),
        pytest.param(STRATEGIES, 1.0, ITERATIONS, TOLERANCE[2], marks=pytest.mark.slow),
        pytest.param(
            (GAINS[CHAIN][0], CHAIN), 1.0, ITERATIONS, TOLERANCE[4], marks=[pytest.mark.slow, pytest.mark.ranks(4)]
        ),
    ],
)
def test_iterations_take_as_long_as_the_critical_path(
    strategies, scale, iterations, tolerance, world, folder, with_groups
):
    rows = measure_all(world, folder, with_groups, strategies, scale=scale, iterations=iterations)
    judge(rows, tolerance)
    assert all(row["ok"] for row in rows), rows
    for row in rows:
        assert row["slowed_s"] == pytest.approx(scale * SLOWED_S[row["strategy"]])
