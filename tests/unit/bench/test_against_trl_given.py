"""The comparison with TRL on given responses: its recorded rows, and our half of it, which needs no TRL."""

import math

import pytest
import torch
from safetensors.torch import load_file

from bench.against_trl import equality, ours
from bench.against_trl.cases import GIVEN_LOSSES, ROWS
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


@pytest.mark.parametrize("name", ["SFT, texts that are cut", "reward model, margins, centred", "IPO"])
def test_our_half(name, tmp_path):
    """A step of SGD takes the gradient off the weights; its rows are those of the data."""
    case, setting = GIVEN_LOSSES[name], equality.small(tmp_path, given=True)[0]
    taken = ours.one_step(case, equality.words_of(setting, case, tmp_path), wide=True)
    before = load_file(setting.models[case.role] / "model.safetensors")
    assert taken.gradients.keys() == taken.after.keys() and math.isfinite(taken.loss)
    for key, gradient in taken.gradients.items():
        start = before[key if key in before else f"model.{key}"].double()
        assert gradient.dtype == torch.float64 and gradient.any()
        torch.testing.assert_close(taken.after[key], start - gradient, rtol=0, atol=1e-15)
    about = equality.about_given(case, taken, {"metrics": taken.metrics, "rows": taken.rows}, 0.0)
    assert about["same_tokens"] and about["rows"] == ROWS
    assert (about["longest"] == GIVEN_LOSSES["SFT, texts that are cut"].theirs["max_length"]) == ("cut" in name)
    for row in taken.rows:
        assert len(row) == (1 if case.page == "sft" else 2)
        for tokens, marks in row:
            assert len(tokens) == len(marks) and not marks[0] and marks[-1], "a prompt, then what is learned"
