"""The comparison with TRL: its recorded rows, and our half of it, which needs no TRL."""

import pytest

from bench.against_trl import equality
from bench.against_trl.cases import LOSSES
from bench.rows import RESULTS, read_rows

ROWS = read_rows(RESULTS / "against_trl.jsonl")


def test_every_loss_was_compared_on_every_model():
    found = [(row["model"], row["case"]) for row in ROWS]
    expected = [(model, name) for model in equality.SMALL for name in LOSSES for _ in range(2)]  # precisions
    assert sorted(found) == sorted(expected)
    assert all(row["versions"]["trl"] for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}, {row['case']}, {row['precision']}")
def test_rows_are_within_their_tolerances(row):
    with_casts = {"RLOO": 2e-5, "SAPO": 5e-6}.get(row["case"], 1e-6)
    tolerance = {"float64": 1e-7, "float64 with casts": with_casts}[row["precision"]]
    assert max(row["loss_error"], row["gradient_error"], row["weights_error"]) <= tolerance == row["tolerance"]
    assert row["loss"] == pytest.approx(row["trl_loss"], rel=tolerance)
    assert equality.both_clips(row) and row["shortest"] < row["longest"] and row["tensors"] > 20
