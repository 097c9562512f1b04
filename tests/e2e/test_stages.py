"""The three stages of InstructGPT as a user runs them, each reading what the one before wrote: supervised fine-tuning,
a reward model, PPO."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.folders import given_rows, write_model
from tests.page_runs import REALLOCATION, assert_same, evaluations, metrics, resume, timeless, trained, weights

SIZES = ("data.max_prompt=8", "generation.max_new_tokens=10", "rollout_batch=8", "mini_batch=4", "micro_batch=3")
RUN = ("iterations=2", "deadline_s=100", "num_samples=0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder, rows = tmp_path_factory.mktemp("stages"), given_rows(20)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:7]), encoding="utf-8")
    write_model(folder / "base", seed=1)
    return folder


def words_of(folder: Path, page: str, model: Path, *more: str) -> list[str]:
    words = ["--algorithm", page, "--model", str(model), f"data.prompts={folder / 'rows.jsonl'}", *SIZES, *RUN, *more]
    held_out = [f"eval.prompts={folder / 'held_out.jsonl'}", "eval.every=1"]
    return words + (held_out if page != "ppo" else [])


def test_three_stages(folder, tmp_path):
    """The first one is resumed on other ranks in the middle, the second one is split into slices and stages."""
    words = words_of(folder, "sft", folder / "base", "optimizer.actor_lr=1e-2", "checkpoint.best=loss")
    whole = trained(words, 1, tmp_path / "whole")
    sft = trained([*words, "iterations=1"], 3, tmp_path / "sft")
    resume(sft, 1, "iterations=2")
    assert_same(sft, whole, "resumed")
    held_out = evaluations(sft)
    assert [row["iteration"] for row in held_out] == [0, 1, 2] and held_out[-1]["loss"] < held_out[0]["loss"]
    for mine, theirs in zip(held_out, evaluations(whole), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert (sft / "best" / "actor" / "model.safetensors").is_file()
    assert not (sft / "samples.txt").read_text(encoding="utf-8").strip()

    rate = "optimizer.reward_lr=1e-2"
    reward = trained(words_of(folder, "reward_model", sft / "actor", rate, *REALLOCATION), 4, tmp_path / "reward")
    first, *_, last = evaluations(reward)
    assert first["loss"] == pytest.approx(0.6931472) and first["accuracy"] == 0.5 and first["score_max"] == 0.0
    assert last["loss"] < 0.69 and last["accuracy"] > 0.5 and last["score_min"] < last["score_mean"] < last["score_max"]
    _check_scores(reward / "reward", last, folder)

    rates = ("optimizer.actor_lr=1e-3", "optimizer.critic_lr=1e-3", f"models.reward={reward / 'reward'}")
    run = trained(words_of(folder, "ppo", sft / "actor", "iterations=1", *rates), 1, tmp_path / "ppo")
    scores = metrics(run)[0]["score"]
    assert last["score_min"] - 1 < scores < last["score_max"] + 1 and scores != 0


@pytest.mark.slow
def test_epochs_with_a_budget_and_logprobs_of_the_start(folder, tmp_path):
    """They are computed on two ranks. A run that is resumed for another epoch equals one that was not, bit by bit, also
    if it has to compute some again."""
    write_model(folder / "reference", seed=3)
    words = ["--algorithm", "dpo", "--model", str(folder / "base"), f"data.prompts={folder / 'rows.jsonl'}", *SIZES]
    words += [f"models.reference={folder / 'reference'}", "deadline_s=100", "optimizer.actor_lr=1e-3"]
    words += ["mini_batch_tokens=50"]
    first = trained([*words, "data.precompute=true", "data.epochs=1"], 2, tmp_path / "first")
    with_file = [*words, f"data.precomputed_logprobs={first}"]
    whole = trained([*with_file, "data.epochs=2"], 1, tmp_path / "whole")
    alone = trained([*words, "data.precompute=true", "data.epochs=1"], 1, tmp_path / "alone")
    killed = shutil.copytree(alone, tmp_path / "killed")  # as if at its start, within a batch
    shutil.rmtree(killed / "checkpoints")
    next((killed / "logprobs").rglob("*.safetensors")).unlink()
    resume(killed, 1)
    assert timeless(killed) == timeless(alone) and weights(killed) == weights(alone)
    next((alone / "logprobs").rglob("*.safetensors")).unlink()
    resume(alone, 1, "data.epochs=2")
    assert_same(alone, whole, "of its own")
    options = json.loads((whole / "config.json").read_text(encoding="utf-8"))
    assert options["iterations"] == len(metrics(whole)) and options["data"]["epochs"] == 2
    part = trained([*with_file, "data.epochs=1"], 1, tmp_path / "part")
    assert 0 < len(metrics(part)) < len(metrics(whole))
    resume(part, 1, "data.epochs=2")
    assert timeless(part) == timeless(whole) and weights(part) == weights(whole)


def _check_scores(folder: Path, expected: dict, data: Path) -> None:
    """Checks that transformers reads the reward model, and scores the held-out responses as the evaluation did."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    scores = []
    for line in (data / "held_out.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for name in ("chosen", "rejected"):
            tokens = tokenizer(row["prompt"] + " " + row[name])["input_ids"] + [tokenizer.eos_token_id]
            scores.append(model(input_ids=torch.tensor([tokens])).logits.item())
    assert sum(scores) / len(scores) == pytest.approx(expected["score_mean"], abs=1e-5)
    assert [min(scores), max(scores)] == pytest.approx([expected["score_min"], expected["score_max"]], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "placement"), [(3, ()), (4, ("--strategy", "separation")), (4, REALLOCATION)])
@pytest.mark.parametrize("task", [(), ("distill.task_coef=0.5", "samples_per_prompt=2", "rollout_batch=4")])
def test_distillation_on_any_ranks(task, num_ranks, placement, folder, tmp_path):
    write_model(folder / "teacher", seed=3, num_layers=1)
    write_model(folder / "judge", head="scalar", seed=2)
    models = (f"models.teacher={folder / 'teacher'}", f"models.reward={folder / 'judge'}", "optimizer.actor_lr=1e-3")
    models = (*models, "optimizer.eps=1e-5")  # a smaller one makes steps of rounding errors where gradients are tiny
    words = ["--algorithm", "distill", "--model", str(folder / "base"), f"data.prompts={folder / 'rows.jsonl'}"]
    words += [*SIZES, *RUN, *models, *task]
    one = trained(words, 1, tmp_path / "one")
    assert metrics(one)[0]["teacher_kl"] > 0
    assert_same(trained([*words, *placement], num_ranks, tmp_path / "more"), one, str(placement))
