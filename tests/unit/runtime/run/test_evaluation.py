"""What an evaluation counts as right, and where that says nothing."""

from types import SimpleNamespace

import numpy as np
import pytest

from rlhf_spmd.runtime.run.evaluation import score_metrics


def metrics_of(*scores: float, right_at: float = 1.0, best: str = "") -> dict:
    """Returns the metrics of one prompt with these scores."""
    config = SimpleNamespace(eval=SimpleNamespace(right_at=right_at), checkpoint=SimpleNamespace(best=best))
    scored = np.array([scores], np.float32).astype(float)
    return score_metrics(SimpleNamespace(config=config), [""], scored)


def test_right_at_is_compared_in_the_precision_of_scores():
    """A score of 0.9 is 0.89999998 as float32, so that pass@1 was 0."""
    assert metrics_of(0.9, 0.89, right_at=0.9)["pass@1"] == 0.5


@pytest.mark.parametrize(
    ("scores", "asked", "is_given"),
    [
        ((0, 1), {}, True),
        ((0, 0), {}, True),
        ((0, 0.5), {}, False),
        ((1, 2), {}, False),
        ((0, 0.5), {"right_at": 0.5}, True),
        ((1, 2), {"best": "pass@1"}, True),
        ((1, 2), {"best": "mean@2"}, False),
    ],
)
def test_pass_is_of_scores_0_and_1_or_asked_for(scores, asked, is_given):
    """It was a copy of the mean, or a number without meaning."""
    found = metrics_of(*scores, **asked)
    assert ("pass@1" in found) == ("pass@2" in found) == is_given and "mean@2" in found and "best@2" in found
