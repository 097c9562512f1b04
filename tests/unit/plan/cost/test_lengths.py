"""LengthDistribution of responses against closed forms, and decode steps against rows that are drawn."""

import heapq
import math

import numpy as np
import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.cost.lengths import (
    LengthDistribution,
    constant,
    decode,
    lognormal,
    mean_of_cut_lognormal,
    of_rows,
    slowest,
)
from rlhf_spmd.plan.cost.seconds import decode_steps


def drawn_steps(lengths: LengthDistribution, num_rows: int, places: int, times: int, num_shards: int = 1) -> float:
    """Returns the mean number of decode steps of the slowest shard when rows are drawn and start in order, each in the
    place that is free first."""
    draw, total = np.random.default_rng(1), 0.0
    for _ in range(times):
        rows_SR = np.searchsorted(-lengths.survival, -draw.random((num_shards, num_rows)), side="right") * lengths.step
        last = 0.0
        for rows_R in rows_SR.tolist():
            ends: list[float] = []
            for row in rows_R:
                heapq.heappush(ends, (heapq.heappop(ends) if len(ends) == places else 0.0) + row)
            last = max(last, *ends)
        total += last
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


@pytest.mark.parametrize("num_shards", [2, 8])
@pytest.mark.parametrize(("sigma", "rows", "places"), [(0.8, 12, 12), (0.8, 20, 16), (0.4, 40, 8), (1.2, 40, 16)])
def test_the_slowest_shard(sigma, rows, places, num_shards):
    lengths = lognormal(100, sigma, 1000)
    found = decode(lengths, rows, places, num_shards)
    drawn = drawn_steps(lengths, rows, places, 40_000 // rows // num_shards, num_shards)
    assert found.steps == pytest.approx(drawn, rel=0.04)
    assert found.steps > 1.03 * decode(lengths, rows, places).steps
    assert decode(constant(100), rows, places, num_shards) == decode(constant(100), rows, places)


def test_the_largest_sum():
    """E[max(X, Y)] of two sums is their mean and half of E|X - Y|; of one length it is that."""
    draw, lengths = np.random.default_rng(0), lognormal(100, 0.8, 600)
    rows = np.searchsorted(-lengths.survival, -draw.random((4000, 8, 16)), side="right") * lengths.step
    for number in (1, 4, 16):
        for shards in (2, 8):
            drawn = float(rows[:, :shards, :number].sum(2).max(1).mean())
            assert number * 100 + lengths.surplus(number, shards) == pytest.approx(drawn, rel=0.02)
            assert 100 + lengths.surplus(1, shards) == pytest.approx(lengths.longest(shards))
    assert lengths.variance == pytest.approx(rows.var(), rel=0.02)
    many = lengths.surplus(3000, 2)  # of two normal sums, deviation / sqrt(pi)
    assert many == pytest.approx(math.sqrt(3000 * lengths.variance / math.pi), rel=0.01)
    assert lengths.surplus(8, 1) == lengths.surplus(0, 8) == constant(7).surplus(8, 8) == constant(7).variance == 0.0


def test_the_slowest_shard_of_a_pipeline():
    """Micro-batches that take t_j in each of pp stages end after sum t_j + (pp - 1) max t_j."""
    draw, lengths = np.random.default_rng(0), lognormal(100, 0.8, 600)
    rows = np.searchsorted(-lengths.survival, -draw.random((4000, 2, 6, 4)), side="right") * lengths.step
    passes = 50 + rows.mean(3)  # prompts have 50
    ends = passes.sum(2) + 3 * passes.max(2)
    assert slowest(lengths, 150, 24, 1, 6, 4) == pytest.approx(ends.mean() / (9 * 150), rel=0.01)
    assert slowest(lengths, 150, 24, 2, 6, 4) == pytest.approx(ends.max(1).mean() / (9 * 150), rel=0.04)
    assert slowest(constant(100), 150, 24, 8, 6, 4) == slowest(lengths, 150, 0, 8) == 1.0


@pytest.mark.parametrize(
    ("mean", "sigma", "limit"), [(0, 1, 8), (9, 1, 8), (4, -1, 8), (4, math.nan, 8), (4, math.inf, 8)]
)
def test_what_cannot_be(mean, sigma, limit):
    with pytest.raises(UserError, match="there are no responses of .*give a mean"):
        lognormal(mean, sigma, limit)


@pytest.mark.parametrize(("num_rows", "places"), [(32, 32), (96, 16), (8, 8), (64, 1)])
@pytest.mark.parametrize(
    "lengths",
    [(1, 2), (2, 3, 3, 5), (3, 3, 3), tuple(range(20, 400, 7)), (5, *[40] * 9)],
    ids=["short", "few", "one", "spread", "cut"],
)
def test_steps_in_which_rows_end_and_begin(lengths, num_rows, places):
    """Against rows that are drawn; short responses often end in the same step."""
    draw, counts = np.random.default_rng(2), []
    for _ in range(100):
        steps = list(decode_steps(draw.choice(lengths, num_rows).tolist(), places))
        waiting = num_rows - places
        begins = 0
        for _, _, ended in steps:
            begins += waiting > 0
            waiting -= len(ended)
        counts.append((len(steps), begins))
    decoding = decode(of_rows(lengths), num_rows, places)
    assert (decoding.ends, decoding.begins) == pytest.approx(np.mean(counts, 0), rel=0.15, abs=0.3)
