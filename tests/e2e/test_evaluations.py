"""Evaluations as a user starts them: the same numbers under every placement, none lost or repeated by a resume."""

import json
import re
import shutil

import numpy as np
import pytest

from rlhf_spmd.config.evaluation_metrics import pass_at
from tests.folders import WORDS, write_all
from tests.page_runs import REALLOCATION, evaluations, metrics, resume, trained

REWARD = """
def length(prompts, responses):
    return [float(len(text.split()) >= 6) for text in responses]


def vowels(prompts, responses):
    return [text.count("a") if text else None for text in responses]
"""


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    """Returns a small run with an evaluation of nine prompts of two sources, three samples each."""
    folder = tmp_path_factory.mktemp("models")
    rows = [{"prompt": " ".join(WORDS[i : i + 1 + i % 4]), "data_source": "xy"[i % 2]} for i in range(9)]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    sizes = ["rollout_batch=8", "mini_batch=4", "iterations=4", "num_samples=0", "optimizer.actor_lr=1e-3"]
    sizes += [f"eval.prompts={folder / 'held_out.jsonl'}", "eval.every=2", "eval.samples_per_prompt=3"]
    return [*write_all(folder), *sizes, "eval.temperature=0.9", "deadline_s=60"]


@pytest.fixture(scope="module")
def one_rank(options, tmp_path_factory):
    return trained(options, 1, tmp_path_factory.mktemp("one") / "run")


def test_rows_and_the_last_line(one_rank, options):
    rows = evaluations(one_rank)
    assert [row["iteration"] for row in rows] == [0, 2, 4]
    assert len({row["tokens_sha256"] for row in rows}) == 3, "the actor or its random numbers changed"
    names = {"mean@3", "best@3"}  # no pass@k: the scores are those of a model
    assert {name.partition("/")[0] for name in rows[0] if "@" in name} == names
    assert rows[0]["mean@3"] == pytest.approx((5 * rows[0]["mean@3/x"] + 4 * rows[0]["mean@3/y"]) / 9)


def test_the_verb_gives_the_numbers_of_training(one_rank, options, warm, tmp_path):
    """On two ranks, with the model that the run wrote. The responses are kept where that is asked for."""
    words = [*options, f"models.actor={one_rank / 'actor'}", "--after", "4", "--out", tmp_path / "kept"]
    status, stdout, stderr = warm.run(["evaluate", "--json", *words], 2)
    assert status == 0, stderr
    mine, theirs = json.loads(stdout.splitlines()[-1]), evaluations(one_rank)[-1]
    assert mine["tokens_sha256"] == theirs["tokens_sha256"]
    names = [name for name in theirs if "@" in name]
    assert [mine[name] for name in names] == pytest.approx([theirs[name] for name in names], rel=1e-6)
    parts = sorted((tmp_path / "kept" / "rollouts" / "evaluation-000004").glob("part-*.jsonl"))
    rows = [json.loads(line) for part in parts for line in part.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 27 and sum(row["scores"] for row in rows) / 27 == pytest.approx(mine["mean@3"])
    status, _, stderr = warm.run(["evaluate", "--json", *words], 2)
    assert status == 2 and "exists already" in stderr


def test_prompts_that_are_cut_are_told(options, warm, tmp_path):
    """No prompt of an evaluation is dropped, whatever data.long_prompts is: they are cut, without a word once."""
    cut = ["data.max_prompt=2", "data.long_prompts=drop", "iterations=1", "rollout_batch=4"]
    for verb, more in (("evaluate", []), ("train", ["--runs", tmp_path])):
        status, stdout, stderr = warm.run([verb, *options, *cut, *more], 1)
        assert status == 0, stderr
        assert "held_out.jsonl: 4 cut at data.max_prompt" in " ".join(stdout.split()), verb


def parts_of(run) -> dict:
    return {path.relative_to(run): path.read_bytes() for path in (run / "rollouts").rglob("part-*.parquet")}


def test_a_resume_repeats_and_skips_none(options, one_rank, tmp_path):
    """Of a run without an evaluation before training, whose others are the same; the samples are written again."""
    words = [*options, "checkpoint.every=1", "checkpoint.keep=9", "checkpoint.best=mean@3", "eval.at_start=false"]
    whole = trained([*words, "rollouts.every=1", "rollouts.format=parquet"], 1, tmp_path / "whole")
    hashes = [[row["tokens_sha256"] for row in evaluations(run)] for run in (whole, one_rank)]
    assert hashes[0] == hashes[1][1:] and (whole / "best" / "actor").is_dir(), "the first one is the best so far"
    assert len(parts_of(whole)) == 4 + 2
    for kept in (1, 2):  # a run that ended before, and right after, an evaluation
        half = tmp_path / f"after{kept}"
        shutil.copytree(whole, half)
        for folder in (half / "checkpoints").iterdir():
            if int(folder.name.removeprefix("iteration-")) > kept:
                shutil.rmtree(folder)
        for path in (half / "rollouts" / "iteration-000002").iterdir():
            path.rename(path.with_name("part-00009.parquet"))  # as from a run with more ranks
        resume(half, 1)
        assert evaluations(half) == evaluations(whole) and parts_of(half) == parts_of(whole)


@pytest.mark.slow
def test_one_that_was_left_out_is_made_up_for(options, one_rank, tmp_path):
    """As after SIGTERM, which leaves no time for an evaluation. It counts for checkpoint.best, too, which may be given
    at a resume."""
    words = [*options, "checkpoint.every=1", "checkpoint.keep=9", "--strategy", "separation"]
    run = trained(words, 2, tmp_path / "run")
    rows = evaluations(run)
    assert [row["tokens_sha256"] for row in rows] == [row["tokens_sha256"] for row in evaluations(one_rank)]
    shutil.rmtree(run / "checkpoints" / "iteration-000004")
    shutil.rmtree(run / "checkpoints" / "iteration-000003")
    lines = (run / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    (run / "evaluations.jsonl").write_text(json.dumps(json.loads(lines[0]) | {"mean@3": -9.0}) + "\n", encoding="utf-8")
    resume(run, 2, "checkpoint.best=mean@3", "iterations=2")
    assert (run / "best" / "actor" / "config.json").is_file()
    resume(run, 2, "iterations=4")
    assert evaluations(run)[1:] == rows[1:]


def test_the_best_checkpoint_is_kept_and_patience_ends_the_run(options, tmp_path):
    """The learning rate is so large that the first evaluations are the best."""
    reward = f"eval.reward_function={options[0].partition('=')[2].removesuffix('actor')}reward.py:length"
    more = ["eval.every=1", "eval.patience=3", "checkpoint.best=mean@3", "checkpoint.every=1", "checkpoint.keep=1"]
    run = trained([*options, reward, *more, "iterations=30", "optimizer.actor_lr=3e-3"], 2, tmp_path / "run")
    rows = evaluations(run)
    values = [row["mean@3"] for row in rows]
    best = values.index(max(values))
    assert len(rows) - 1 - best == 3 and len(rows) < 31 and all(0 <= value <= 1 for value in values)
    kept = {int(folder.name.removeprefix("iteration-")) for folder in (run / "checkpoints").iterdir()}
    assert kept == {best, len(rows) - 1} - {0}
    assert (run / "best" / "actor" / "config.json").is_file() == (best > 0)
    assert len(metrics(run)) == len(rows) - 1


def samples_of(run, folder: str) -> list[dict]:
    parts = sorted((run / "rollouts" / folder).glob("part-*.jsonl"))
    rows = [json.loads(line) for part in parts for line in part.read_text(encoding="utf-8").splitlines()]
    return sorted(rows, key=lambda row: (row["prompt_index"], row["sample"]))


SEPARATION = pytest.param(("--strategy", "separation"), id="separation", marks=pytest.mark.slow)
SPLIT = pytest.param(REALLOCATION, id="reallocation")


def test_each_of_several_functions_is_shown_and_may_choose_the_best(options, warm, tmp_path):
    """Against counting the samples. The scores of `length` are 0 and 1, those of `vowels` are not."""
    reward = options[0].partition("=")[2].removesuffix("actor") + "reward.py"
    words = [*options, f"reward_function={reward}:length,{reward}:vowels", "reward_weights=1,0.2", "iterations=1"]
    words += ["rollouts.every=1", "checkpoint.best=length/pass@2", "eval.every=1"]
    status, stdout, stderr = warm.run(["train", *words, "--runs", tmp_path, "--name", "run"], 0)
    assert status == 0, stderr
    for row in evaluations(tmp_path / "run"):
        samples = samples_of(tmp_path / "run", f"evaluation-{row['iteration']:06d}")
        scores = {name: np.array([one[name] for one in samples], float) for name in ("scores", "score_length")}
        assert row["mean@3"] == pytest.approx(scores["scores"].mean(), abs=1e-6)
        assert row["length/mean@3"] == pytest.approx(scores["score_length"].mean())
        rights = scores["score_length"].reshape(-1, 3).sum(1)
        assert row["length/pass@2"] == pytest.approx(np.mean([pass_at(2, 3, int(right)) for right in rights]))
        by_prompt: dict[int, list[float]] = {}
        for one in samples:
            by_prompt.setdefault(one["prompt_index"], []).append(one["score_vowels"])
        means = [np.mean(known) for of_one in by_prompt.values() if (known := [x for x in of_one if x is not None])]
        assert row["vowels/mean@3"] == pytest.approx(np.mean(means))
        passes = {name.partition("pass@")[0] for name in row if "pass@" in name}
        assert passes == {"length/"} and "length/mean@3/x" in row
    text = " ".join(stdout.split())
    mean, whole = (f"{row[name]:.4g}" for name in ("length/mean@3", "mean@3"))
    assert f"after 1 iteration: mean@3 (weighted sum) {whole}, " in text
    assert f"length/mean@3 {mean}, " in text and "mean@3/x (weighted sum) " in text and "length/mean@3/x " in text
    said = stdout.partition("evaluation before training")[2].partition("iteration")[0].splitlines()
    assert len(said) > 1 and max(map(len, said)) <= 80
    status, stdout, _ = warm.run(["status", tmp_path / "run"], 0)
    assert re.search(r"last .*reward .*, score_length [\d.]+, score_vowels [\d.]+, response_length", stdout), stdout


@pytest.mark.parametrize("placement", [SEPARATION, SPLIT])
def test_samples_on_disk_are_the_same_under_every_placement(placement, options, tmp_path):
    reward = options[0].partition("=")[2].removesuffix("actor") + "reward.py"
    functions = f"reward_function={reward}:length,{reward}:vowels"
    words = [*options, "rollouts.every=1", "samples_per_prompt=2", functions]
    words = [*words, "reward_function_mode=add", "iterations=2"]
    one, many = trained(words, 1, tmp_path / "one"), trained([*words, *placement], 4, tmp_path / "many")
    folders = {path.name for path in (one / "rollouts").iterdir()}
    assert folders == {f"iteration-{n:06d}" for n in (0, 1)} | {f"evaluation-{n:06d}" for n in (0, 2)}
    for folder in folders:
        mine, theirs = samples_of(many, folder), samples_of(one, folder)
        assert len(mine) == len(theirs) == (16 if folder.startswith("iteration") else 27)
        for row, other in zip(mine, theirs, strict=True):
            assert row.keys() == other.keys() and row["response"] == other["response"]
            assert len(row["response"].split()) <= len(row["response_tokens"]) and row["score_length"] in (0.0, 1.0)
            for name, value in row.items():
                is_number = isinstance(value, float | list)
                assert value == (pytest.approx(other[name], rel=1e-4, abs=1e-5) if is_number else other[name]), name
    for row, other in zip(evaluations(many), evaluations(one), strict=True):
        assert "length/pass@3" in row and row["length/mean@3"] == pytest.approx(row["score_length"]), "not the sum"
        assert row.pop("tokens_sha256") == other.pop("tokens_sha256")
        assert row == pytest.approx(other, rel=1e-5, abs=1e-5)
    rows = samples_of(one, "iteration-000001")
    assert metrics(one)[1]["score"] == pytest.approx(sum(row["scores"] for row in rows) / 16, abs=1e-6)
