"""Metrics of evaluations against counting."""

import itertools
import math

import pytest

from rlhf_spmd.config.evaluation_metrics import (
    measure,
    measure_by_source,
    metric_names,
    pass_at,
)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_response(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([index < c for index in range(n)], k))
        assert pass_at(k, n, c) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_metrics_of_several_samples():
    scores = [[1.0, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]
    found = measure(scores, right_at=0.5)
    assert list(found) == metric_names(4) == ["mean@4", "best@4", "pass@1", "pass@2", "pass@4"]
    expected = {"mean@4": 0.1875, "best@4": 0.5, "pass@1": 0.25, "pass@2": (1 - 1 / 6) / 2, "pass@4": 0.5}
    assert found == pytest.approx(expected)
    assert metric_names(1) == list(measure([[2.0]], 1.0)) == ["mean@1", "pass@1"]
    assert metric_names(6) == ["mean@6", "best@6", "pass@1", "pass@2", "pass@4", "pass@6"]


def test_each_of_several_functions_has_metrics_of_its_own():
    assert metric_names(1, ["right", "form"]) == [
        *("mean@1", "pass@1", "right/mean@1", "right/pass@1", "form/mean@1", "form/pass@1")
    ]
    assert "form/pass@1" not in metric_names(1, ["form"], passes=False)


def test_a_response_without_a_score_is_not_right_and_counts_nowhere_else():
    found = measure([[1.0, math.nan, 0.0, math.nan], [math.nan, 1.0, 1.0, 1.0]], 1.0)
    assert (found["mean@4"], found["best@4"]) == ((0.5 + 1) / 2, 1.0)
    assert found["pass@1"] == (1 / 4 + 3 / 4) / 2 and found["pass@2"] == (1 / 2 + 1) / 2


def test_sources_are_told_apart_if_there_are_several():
    scores = [[1.0], [0.0], [1.0]]
    found = measure_by_source(scores, ["b", "a", "b"], 1.0)
    assert found["mean@1"] == pytest.approx(2 / 3)
    assert (found["mean@1/a"], found["mean@1/b"], found["pass@1/b"]) == (0.0, 1.0, 1.0)
    assert set(measure_by_source(scores, ["a"] * 3, 1.0)) == {"mean@1", "pass@1"}
