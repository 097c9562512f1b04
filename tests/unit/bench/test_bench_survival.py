"""The summaries of the benches of long runs and of guards."""

import pytest

from bench.faults.soak import ITERATIONS, growth
from bench.speed.guards import shares
from bench.tables import text_table


def test_growth_compares_the_second_tenth_with_the_last():
    tenth = ITERATIONS // 10
    memory = [(0, 9999), (tenth - 1, 9999), (tenth, 100), (2 * tenth - 1, 200), (5 * tenth, 9999), (9 * tenth, 250)]
    assert growth(memory) == {"first_bytes": 200, "last_bytes": 250, "growth": pytest.approx(0.25)}


def test_shares_are_of_pairs():
    """A machine that is slower for a while slows both of a pair."""
    found = shares("guards", [1.02, 2.04, 5.1, 9.0], [1.0, 2.0, 5.0, 1.0])
    assert found["guards"] == pytest.approx(0.02) and found["guards_low"] == pytest.approx(0.02)
    row = {"strategy": "flattening", "ranks": 8, "iteration_s": 1.0, "stall": 0.01, "saving": 0.03, **found}
    assert "+2.0%" in text_table("guards", [row])
