"""The comparison with TRL on given responses: its recorded rows, and our half of it, which needs no TRL."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from bench.against_trl import against_trl, equality, our_steps, ours, steps, work
from bench.against_trl.cases import GIVEN_LOSSES, ROWS
from bench.against_trl.equality import METRICS, SMALL, WITH_CASTS
from bench.against_trl.work import WORKS
from bench.columns import ERRORS, JOINED
from bench.rows import RESULTS, read_rows
from rlhf_spmd.algorithms.preferences import direct_preference_loss
from rlhf_spmd.plan.cost.seconds import head_flops, layer_flops
from rlhf_spmd.plan.workload import ModelShape

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


def test_the_table_has_the_worst_of_all_models():
    _, joined, _ = JOINED["against_trl_given"]
    (line,) = [line for line in joined(RECORDED) if line["case"] == "IPO"]
    found = [row for row in RECORDED if (row["case"], row["precision"]) == ("IPO", "float64")]
    assert len(found) == 2 and all(line["float64"][name] == max(row[name] for row in found) for name in ERRORS)


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


def test_rows_of_conversations_mark_the_turns_of_the_assistant(tmp_path):
    case, setting = GIVEN_LOSSES["SFT, all turns of the assistant"], equality.small(tmp_path, given=True)[0]
    rows = case.rows(equality.text_of)
    taken = ours.one_step(case, equality.words_of(setting, case, tmp_path))
    said = [message["content"] for row in rows for message in row["messages"][1::2]]
    learned = sum(len(text.split()) + 1 for text in said)  # with an end of sequence
    assert sum(sum(marks) for row in taken.rows for _, marks in row) == learned
    assert {len(row["messages"]) for row in rows} == {2, 4, 6}


def test_rows_are_the_same_in_any_order():
    case = GIVEN_LOSSES["DPO"]
    one, other = [([1, 2], [0, 1]), ([1, 3], [0, 1])], [([4, 2], [0, 1]), ([4, 3, 5], [0, 1, 1])]
    as_json = [[[list(tokens), list(marks)] for tokens, marks in row] for row in (other, one)]
    assert equality.same_tokens(case, [one, other], as_json)
    assert not equality.same_tokens(case, [one, other], [as_json[0], as_json[0]])
    assert not equality.same_tokens(case, [one, other], [as_json[0], as_json[1][::-1]]), "exchanged"
    as_json[1][0][1] = [0, 0]
    assert not equality.same_tokens(case, [one, other], as_json), "other tokens are learned"
    assert equality.same_tokens(GIVEN_LOSSES["reward model"], [one, other], as_json)


def test_metrics_are_found_by_their_aliases():
    mine = {"token_accuracy": 0.5, "entropy": 2.0, "trained_tokens": 7.0}
    theirs = {"mean_token_accuracy": 0.5, "entropy": 1.0, "num_tokens": 9.0}
    assert equality.metric_errors(GIVEN_LOSSES["SFT"], mine, theirs) == {"mean_token_accuracy": 0.0, "entropy": 1.0}


def test_the_mixture_of_trls_losses_is_cdpo():
    """The weights that the comparison gives to TRL's `sigmoid` and `robust`, against our loss."""
    case = GIVEN_LOSSES["cDPO"]
    smoothed = case.theirs["label_smoothing"]
    chosen, rejected = (torch.linspace(-2, 1, 5, dtype=torch.float64)[:, None] * scale for scale in (1.0, 0.3))
    mask, zeros = torch.ones(5, 1, dtype=torch.bool), torch.zeros(5, 1, dtype=torch.float64)
    mine, _ = direct_preference_loss(
        chosen, rejected, mask, mask, zeros, zeros, beta=case.theirs["beta"], label_smoothing=smoothed
    )
    right, wrong = (
        -torch.nn.functional.logsigmoid(sign * case.theirs["beta"] * (chosen - rejected)) for sign in (1, -1)
    )
    losses = {"sigmoid": right, "robust": ((1 - smoothed) * right - smoothed * wrong) / (1 - 2 * smoothed)}
    weights = dict(zip(case.theirs["loss_type"], case.theirs["loss_weights"], strict=True))
    assert mine.item() == pytest.approx(sum(weights[name] * losses[name].sum().item() for name in losses), rel=1e-12)


def test_one_case_is_of_its_parts_only(monkeypatch, tmp_path):
    """`--case` runs the parts that have this loss."""
    ran = []

    def part_of(name: str):
        measure = lambda folder, cases: ran.append((name, [case.name for case in cases])) or []  # noqa: E731
        return replace(against_trl.PARTS[name], measure=measure)

    monkeypatch.setattr(against_trl.equality, "PEER", tmp_path)
    monkeypatch.setattr(against_trl, "PARTS", {name: part_of(name) for name in against_trl.PARTS})
    monkeypatch.setattr(against_trl, "keep", lambda *_: None)
    monkeypatch.setattr(against_trl, "versions_of_peer", dict)
    assert against_trl.main(["--case", "IPO"]) == 0
    assert against_trl.main(["equality", "--case", "GRPO"]) == 0
    assert ran == [("given", ["IPO"]), ("equality", ["GRPO"])]
    with pytest.raises(SystemExit):
        against_trl.main(["given", "--case", "GRPO"])


# ---- whole steps ----------------------------------------------------------------------------------------------------


def test_rows_of_steps():
    rows = read_rows(RESULTS / "against_trl_given_steps.jsonl")
    assert [row["work"] for row in rows] == list(WORKS)
    for row in rows:
        assert row["ratio"] == sorted(row["ratios"])[len(row["ratios"]) // 2] and row["versions"]["trl"]
        assert row["ok"] == (row["ratio"] >= row["promised"]) and row["promised"] == WORKS[row["work"]].promised
        assert row["floor_s"] == pytest.approx(row["flops"] / row["matrix_flops_per_s"])
        for who in ("ours", "peer"):
            assert 0 < row[f"{who}_share"] < 1, "no program is faster than its floor"
            assert row[f"{who}_peak_bytes"] > 4 * 4 * 134e6, "weights, gradients and two moments in float32"


@pytest.mark.parametrize("name", WORKS)
def test_our_half_of_a_step_reads_all_rows(name, tmp_path):
    """One optimizer step in an iteration, with nothing cut off."""
    of = WORKS[name]
    model = equality.small(tmp_path, given=True)[0].models["reward" if of.page == "reward_model" else "actor"]
    config = our_steps.config_of(str(model), our_steps.given_words(of, tmp_path), of.page)
    rows = work.rows_of(of)
    assert config.rollout_batch == config.mini_batch == len(rows) == work.SEQUENCES // of.sequences_per_row
    assert config.micro_batch * of.sequences_per_row == work.GIVEN_MICRO_BATCH
    assert work.rows_of(of) == rows, "both programs draw the same"
    responses = [row[column] for row in rows for column in row if column != "prompt"]
    assert len(set(responses)) == work.SEQUENCES
    assert max(len(text.split()) for text in responses) <= work.MOST_WORDS


def test_rows_of_steps_with_adapters():
    """All ranks of a program's steps count, the most memory of them; each of three promises is checked."""
    of = next(iter(work.ADAPTED.values()))
    step = {"wall_s": 9.0, "peak_bytes": 10}
    rounds = [
        {"full": step | {"step_s": 3.0}, "ours": step | {"step_s": s, "peak_bytes": 7}, "peer": step | {"step_s": 4.0}}
        for s in (2.0, 1.0, 2.5)
    ]
    row = steps.adapted_row(of, rounds)
    assert row["ok"] and row["memory_share"] == 0.7 and row["ours_step_s"] == row["ratio"] == 2.0
    for who, worse in (("ours", {"peak_bytes": 8}), ("peer", {"peak_bytes": 7}), ("peer", {"step_s": 1.0})):
        assert not steps.adapted_row(of, [one | {who: one[who] | worse} for one in rounds])["ok"]


def test_full_length_rows_are_as_long_as_any():
    of = work.ADAPTED["SFT, full length"]
    rows = work.rows_of(of)
    assert len(rows) % work.GIVEN_MICRO_BATCH == 0
    assert {len(row["completion"].split()) for row in rows} == {work.MOST_WORDS}


def test_operations_of_a_step(monkeypatch):
    """Two for each weight and token, three passes, four with a reference; logits of the response's tokens only."""
    shape = ModelShape(2, 8, 16, 2, 1, head_dim=4, vocab_size=100)
    monkeypatch.setattr(steps, "shape_of_folder", lambda model: shape)
    layers, logits = 12 * layer_flops(shape, 10, 5), head_flops(shape, 6)
    found = {name: steps.given_flops(WORKS[name], None, [(4, 6)]) for name in WORKS}
    assert found["reward model"] == pytest.approx(layers / 2)
    assert found["SFT"] == pytest.approx(layers / 2 + 3 * logits)
    assert found["DPO"] == pytest.approx(4 / 3 * found["SFT"])
