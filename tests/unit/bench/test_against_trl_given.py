"""The comparison with TRL on given responses: its recorded rows."""

import pytest

from bench.against_trl.cases import GIVEN_LOSSES
from bench.against_trl.equality import METRICS, SMALL, WITH_CASTS
from bench.rows import RESULTS, read_rows

RECORDED = read_rows(RESULTS / "against_trl_given.jsonl")
NUM_METRICS = {"sft": 2, "reward_model": 5, "dpo": 6}  # that both programs log


def test_every_loss_was_compared_on_every_model():
    expected = [(model, name, precision) for model in SMALL for name in GIVEN_LOSSES for precision in METRICS]
    assert sorted((row["model"], row["case"], row["precision"]) for row in RECORDED) == sorted(expected)
    assert all(row["versions"]["trl"] for row in RECORDED)


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: f"{row['model']}, {row['case']}, {row['precision']}")
def test_rows_are_within_their_tolerances(row):
    tolerance, of_metrics = {"float64": (1e-7, 1e-7), WITH_CASTS: (3e-6, 1e-4)}[row["precision"]]
    assert max(row["loss_error"], row["gradient_error"], row["weights_error"]) <= tolerance == row["tolerance"]
    assert row["metrics_error"] <= of_metrics == row["metrics_tolerance"]
    assert row["ok"] and row["same_tokens"] and row["shortest"] < row["longest"] and row["tensors"] >= 20
    assert len(row["metrics"]) == NUM_METRICS[GIVEN_LOSSES[row["case"]].page]
