"""The comparison with TRL: its recorded rows, and our half of it, which needs no TRL."""

import json
import math

import pytest
import torch

from bench.against_trl import equality, ours, steps, work
from bench.against_trl.cases import LOSSES
from bench.against_trl.widened import widened
from bench.columns import by_case
from bench.rows import RESULTS, read_rows

ROWS = read_rows(RESULTS / "against_trl.jsonl")


def test_every_loss_was_compared_on_every_model():
    found = [(row["model"], row["case"]) for row in ROWS]
    expected = [(model, name) for model in equality.SMALL for name in LOSSES for _ in range(2)]  # precisions
    assert sorted(found) == sorted(expected)
    assert all(row["versions"]["trl"] for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}, {row['case']}, {row['precision']}")
def test_rows_are_within_their_tolerances(row):
    with_casts = 2e-5 if row["case"] == "RLOO" else 1e-6
    tolerance = {"float64": 1e-7, "float64 with casts": with_casts}[row["precision"]]
    assert max(row["loss_error"], row["gradient_error"], row["weights_error"]) <= tolerance == row["tolerance"]
    assert row["loss"] == pytest.approx(row["trl_loss"], rel=tolerance)
    assert equality.both_clips(row) and row["shortest"] < row["longest"] and row["tensors"] > 20


def test_the_table_has_the_worst_of_all_models():
    (line,) = [line for line in by_case(ROWS) if line["case"] == "RLOO"]
    found = [row["gradient_error"] for row in ROWS if (row["case"], row["precision"]) == ("RLOO", "float64")]
    assert len(found) == 2 and line["float64"]["gradient_error"] == max(found)


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


def test_errors_are_relative_to_each_tensor():
    mine = ours.Taken(1.0, {"a": torch.ones(4), "b": torch.ones(2)}, {"a": torch.ones(4), "b": torch.ones(2)}, {}, [])
    theirs = {
        f"{what} model.{name}": tensor for what in ("gradient", "after") for name, tensor in mine.gradients.items()
    }
    assert equality.errors(mine, 1.0, theirs)["gradient_error"] == 0
    found = equality.errors(mine, 0.5, theirs | {"gradient model.b": torch.tensor([1.0, 2.0])})
    assert found["loss_error"] == 1.0 and found["worst"] == "b"
    assert found["gradient_error"] == pytest.approx(1 / math.sqrt(5)) and found["weights_error"] == 0


def test_casts_are_widened():
    x = torch.ones(2, dtype=torch.float64) / 3
    with widened():
        assert x.float().dtype == x.to(torch.float32).dtype == torch.zeros(1).dtype == torch.float64
    assert x.float().dtype == x.to(torch.float32).dtype == torch.zeros(1).dtype == torch.float32


# ---- whole steps ----------------------------------------------------------------------------------------------------


def test_lengths_are_the_same_for_both_programs():
    assert work.lengths_of("full length", 1) == [work.LIMIT] * (work.PROMPTS * work.SAMPLES)
    spread = [work.lengths_of("spread lengths", step) for step in range(80)]
    assert spread == [work.lengths_of("spread lengths", step) for step in range(80)] and spread[0] != spread[1]
    flat = sorted(length for one in spread for length in one)
    assert flat[0] >= 1 and flat[-1] == work.LIMIT
    assert 15 < flat[len(flat) // 2] < 25, "the median"


def test_the_floor_counts_products(tmp_path):
    """Without attention's products: 2 operations per weight and token for a pass, 5 passes over each response."""
    sizes = {"hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 3, "num_attention_heads": 2}
    sizes |= {
        "model_type": "llama",
        "num_key_value_heads": 1,
        "head_dim": 4,
        "vocab_size": 1000,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    prompts, rows, limit = work.PROMPTS, work.PROMPTS * work.SAMPLES, work.LIMIT
    layer, head, tokens = 8 * (2 * 8 + 2 * 4) + 3 * 8 * 4, 8 * 1000, limit * rows
    prompt = 10.0
    generated = 2 * (3 * layer * (prompts * prompt + tokens - rows) + head * tokens)
    passes = 4 * 2 * (3 * layer * (rows * prompt + tokens) + head * tokens)
    found = steps.grpo_flops(tmp_path, "full length", int(prompts * prompt))
    contexts = 3 * 4 * 8 * (prompts * prompt * prompt / 2 + rows * (limit - 1) * (prompt + limit / 2))
    contexts += 4 * 3 * 4 * 8 * rows * (prompt + limit) ** 2 / 2
    assert found == pytest.approx(generated + passes + contexts, rel=1e-12)


def test_rows_of_steps():
    rows = read_rows(RESULTS / "against_trl_steps.jsonl")
    assert [(row["work"], row["peer"]) for row in rows] == [
        (name, peer) for name in work.LENGTHS for peer in steps.LEAST[name]
    ]
    for row in rows:
        assert row["ratio"] == sorted(row["ratios"])[len(row["ratios"]) // 2] and row["versions"]["trl"]
        assert row["ok"] == (row["ratio"] >= row["promised"])
        assert row["floor_s"] == pytest.approx(row["flops"] / row["matrix_flops_per_s"])
        for who in ("ours", "peer"):
            assert 0 < row[f"{who}_share"] < 1, "no program is faster than its floor"
