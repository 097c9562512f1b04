"""LengthDistribution of responses against closed forms, and decode steps against rows that are drawn."""

import heapq
import math
from itertools import accumulate

import numpy as np
import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.cost.lengths import (
    CELLS,
    LengthDistribution,
    constant,
    decode,
    lognormal,
    mean_of_cut_lognormal,
    of_rows,
)


def exponential(mean: float) -> LengthDistribution:
    """Cut where e^-16 are left."""
    step = 16 * mean / CELLS
    survival = np.exp(-(np.arange(CELLS) + 0.5) * step / mean)
    survival[0] = 1.0
    return LengthDistribution(step, survival)


def drawn_steps(lengths: LengthDistribution, num_rows: int, places: int, times: int) -> float:
    """The mean number of decode steps when rows are drawn and start in order, each in the place that is free first."""
    draw, total = np.random.default_rng(1), 0.0
    for _ in range(times):
        rows = np.searchsorted(-lengths.survival, -draw.random(num_rows), side="right") * lengths.step
        ends: list[float] = []
        for row in rows:
            heapq.heappush(ends, (heapq.heappop(ends) if len(ends) == places else 0.0) + row)
        total += max(ends)
    return total / times


@pytest.mark.parametrize(("mean", "sigma", "limit"), [(300, 0.3, 1000), (300, 1.2, 2048), (900, 0.5, 1024), (8, 1, 64)])
def test_a_lognormal(mean, sigma, limit):
    lengths = lognormal(mean, sigma, limit)
    assert lengths.mean == pytest.approx(mean, rel=1e-12) and lengths.longest(1) == pytest.approx(mean, rel=1e-12)
    assert lengths.limit == pytest.approx(limit, rel=0.01)
    assert mean < lengths.longest(2) < lengths.longest(16) < lengths.longest(10**6) <= lengths.limit
    square = 2 * lengths.step**2 * float(((np.arange(len(lengths.survival)) + 0.5) * lengths.survival).sum())
    draw = np.random.default_rng(0).standard_normal(200_000)
    mu = next(mu for mu in np.arange(-5, 30, 1e-3) if mean_of_cut_lognormal(mu, sigma, limit) >= mean)
    rows = np.minimum(np.exp(mu + sigma * draw), limit)
    assert rows.mean() == pytest.approx(mean, rel=0.01) and (rows**2).mean() == pytest.approx(square, rel=0.02)


def test_a_lognormal_without_a_limit():
    """E[X] = exp(mu + sigma^2 / 2)."""
    assert mean_of_cut_lognormal(3.0, 0.5, 1e9) == pytest.approx(math.exp(3.125), rel=1e-12)
    assert mean_of_cut_lognormal(30.0, 0.5, 100.0) == pytest.approx(100.0)


@pytest.mark.parametrize("mean", [1, 37, 1024])
def test_one_length(mean):
    for lengths in (constant(mean), lognormal(mean, 0.0, 2048), lognormal(2048, 1.0, 2048) if mean == 1024 else None):
        if lengths is not None:
            length = lengths.mean
            assert lengths.longest(1) == lengths.longest(1000) == length
            for rows, places, rounds in ((1, 8, 1), (8, 8, 1), (9, 8, 2), (20, 1, 20), (64, 16, 4), (3, 2, 2)):
                found = decode(lengths, rows, places)
                assert found.steps == pytest.approx(rounds * length)
                assert found.tokens == pytest.approx(rows * length)
    assert decode(constant(mean), 0, 8).steps == decode(constant(mean), 0, 8).tokens == 0


def test_exponential_rows():
    """The longest of n has H(n) means. Ends come at the rate k / mean until n - k rows have ended, then k are left."""
    lengths, harmonic = exponential(100.0), [0.0, *accumulate(1 / n for n in range(1, 65))]
    for rows in (1, 2, 8, 64):
        assert lengths.longest(rows) == pytest.approx(100 * harmonic[rows], rel=1e-3)
        assert decode(lengths, rows, 64).steps == pytest.approx(lengths.longest(rows), rel=1e-9)
    for rows, places in ((64, 8), (200, 16), (9, 8), (33, 32)):
        expected = 100 * ((rows - places) / places + harmonic[places])
        assert decode(lengths, rows, places).steps == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0])
@pytest.mark.parametrize(("rows", "places"), [(16, 16), (12, 8), (40, 16), (60, 4), (20, 1)])
def test_rows_that_take_turns(sigma, rows, places):
    lengths = lognormal(100, sigma, 400)
    found = decode(lengths, rows, places)
    assert found.steps == pytest.approx(drawn_steps(lengths, rows, places, 20_000 // rows), rel=0.03)
    assert found.tokens == pytest.approx(rows * 100) and found.steps == sum(steps for steps, _ in found.phases)
    active = [rows for _, rows in found.phases]
    assert active == pytest.approx(sorted(active, reverse=True)) and active[0] <= places
    assert decode(lengths, rows, places) == found


def test_responses_that_were_made():
    lengths = of_rows([10, 20, 20, 50])
    assert (lengths.mean, lengths.limit) == (25.0, 50.0)
    assert lengths.longest(2) == pytest.approx((10 + 20 * 8 + 50 * 7) / 16)
    assert decode(lengths, 3, 1).steps == pytest.approx(75)
    long = of_rows(range(1, 30_001))
    assert len(long.survival) == CELLS and long.mean == pytest.approx(15_000.5)
    assert long.longest(2) == pytest.approx(20_000, rel=1e-3)


@pytest.mark.parametrize(
    ("mean", "sigma", "limit"), [(0, 1, 8), (9, 1, 8), (4, -1, 8), (4, math.nan, 8), (4, math.inf, 8)]
)
def test_what_cannot_be(mean, sigma, limit):
    with pytest.raises(UserError, match="there are no responses of .*give a mean"):
        lognormal(mean, sigma, limit)


def test_no_responses():
    with pytest.raises(UserError, match="give a run with rollouts"):
        of_rows([])
