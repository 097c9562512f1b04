"""The summary of the bench of a long run."""

import pytest

from bench.faults.soak import ITERATIONS, growth


def test_growth_compares_the_second_tenth_with_the_last():
    tenth = ITERATIONS // 10
    memory = [(0, 9999), (tenth - 1, 9999), (tenth, 100), (2 * tenth - 1, 200), (5 * tenth, 9999), (9 * tenth, 250)]
    assert growth(memory) == {"first_bytes": 200, "last_bytes": 250, "growth": pytest.approx(0.25)}
