"""The comparison with TRL: its recorded rows, and our half of it, which needs no TRL."""

import math

import pytest
import torch

from bench.against_trl import equality, ours
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


@pytest.mark.parametrize("name", ["DAPO's loss", "RLOO"])
def test_our_half(name, tmp_path):
    """A step of SGD takes the gradient off the weights; the rows that TRL would get are those of the step."""
    setting, case = equality.small(tmp_path)[1], LOSSES[name]
    taken = ours.one_step(case, equality.words_of(setting, case, tmp_path), seed=1, wide=True)
    before = {key: x.double() for key, x in equality.load_file(setting.models["actor"] / "model.safetensors").items()}
    assert taken.gradients.keys() == taken.after.keys() and math.isfinite(taken.loss)
    for key, gradient in taken.gradients.items():
        start = before[key if key in before else f"model.{key}"]
        assert gradient.dtype == torch.float64 and gradient.any()
        torch.testing.assert_close(taken.after[key], start - gradient, rtol=0, atol=1e-15)
    assert len(taken.rows) == 48 and len({(row["prompt_index"], row["sample"]) for row in taken.rows}) == 48
    for row in taken.rows:
        assert len(row["old"]) == len(row["response"]) <= equality.LIMIT and row["prompt"]
    assert len({row["reward"] for row in taken.rows}) > 10


# ---- whole steps ----------------------------------------------------------------------------------------------------
