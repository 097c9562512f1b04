"""Ticks are round, at least three, and their labels are their values."""

from decimal import Decimal
from itertools import pairwise

import pytest

from rlhf_spmd.runtime.pictures.axis_ticks import ticks_around, ticks_between

RANGES = [(0, 1), (0.0023, 0.002505), (-1e-7, 3.09e-7), (1e9, 1e9 + 1), (5, 5), (0, 0), (-3, 2e5), (-1e299, 1e299)]
RANGES += [(0.6931, 0.6988), (-1e-30, 1e30), (5e-324, 1e-300), (999, 1001), (-0.5, -0.4999)]


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_ticks_enclose_the_values(low, high):
    ticks = ticks_around(low, high)
    values = [tick.value for tick in ticks]
    assert 3 <= len(ticks) <= 6 and values[0] <= low <= high <= values[-1]
    assert [float(tick.label) for tick in ticks] == values == sorted(set(values))
    steps = {Decimal(b.label) - Decimal(a.label) for a, b in pairwise(ticks)}
    assert len(steps) == 1 and steps.pop().normalize().as_tuple().digits in ((1,), (2,), (2, 5), (5,))


@pytest.mark.parametrize(("first", "last"), [(0, 2), (1, 25), (1, 400), (3, 5), (0, 100_000), (7, 29), (1e17, 1e17)])
def test_ticks_of_iterations_are_whole(first, last):
    ticks = ticks_between(first, last)
    assert 3 <= len(ticks) <= 8 and all(tick.value == int(tick.value) == float(tick.label) for tick in ticks)
    assert last == first or all(first <= tick.value <= last for tick in ticks)
