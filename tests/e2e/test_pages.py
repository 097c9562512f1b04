"""A page of a user (tests/toy_pages/group.py), trained as by its user: the same numbers on 1, 3 and 4 ranks and in
other layouts. No other file knows it. It has a second generating call and groups of 16 samples, cut by three ranks."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.folders import given_rows, write_model
from tests.page_runs import REALLOCATION, assert_same, evaluations, metrics, resume, timeless, trained, weights

PAGE = Path(__file__).parents[1] / "toy_pages" / "group.py"
SIZES = ("rollout_batch=4", "samples_per_prompt=16", "mini_batch=32")
PLACEMENTS = [(3, ()), *(pytest.param(4, more, marks=pytest.mark.slow) for more in (REALLOCATION, ()))]


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    """Returns the command line of the page."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given_rows(24)), encoding="utf-8")
    write_model(folder / "lm", seed=1)
    write_model(folder / "judge", head="scalar", seed=2)
    base = ["--algorithm", str(PAGE), *SIZES, f"models.judge={folder / 'judge'}", "--model", str(folder / "lm")]
    data = [f"data.prompts={folder / 'rows.jsonl'}", "data.max_prompt=8", "generation.max_new_tokens=10"]
    return [*base, *data, "iterations=2", "micro_batch=3", "deadline_s=100", "optimizer.actor_lr=1e-3"]


@pytest.fixture(scope="module")
def alone(options, tmp_path_factory) -> Path:
    """Returns the run on one rank, with a checkpoint after each iteration."""
    return trained([*options, "checkpoint.every=1", "checkpoint.keep=2"], 1, tmp_path_factory.mktemp("alone") / "run")


@pytest.mark.parametrize(("num_ranks", "more"), PLACEMENTS)
def test_a_page_trains_to_the_same_numbers_anywhere(num_ranks, more, options, alone, tmp_path):
    assert (alone / "algorithm.py").read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")
    rows = metrics(alone)
    assert len(rows) == 2 and weights(alone) and rows[0] != rows[1]
    assert_same(trained([*options, *more], num_ranks, tmp_path / "run"), alone, f"{num_ranks} ranks")


def test_a_page_is_resumed_from_its_run_folder(alone, tmp_path):
    """Its second iteration has the bits of a run that was not stopped."""
    half = shutil.copytree(alone, tmp_path / "half")
    shutil.rmtree(half / "checkpoints" / "iteration-000002")
    resume(half, 1)
    assert timeless(alone) == timeless(half)
    assert weights(alone) == weights(half)


def test_check_and_plan_know_a_page(options, warm, tmp_path):
    """Every strategy places it or says why not, and the planner finds a plan that check accepts."""
    base, refused = options[: 2 + len(SIZES) + 3], {}
    for strategy in ("flattening", "interleaving1", "interleaving2", "separation", "reallocation"):
        status, stdout, stderr = warm.run(["check", strategy, "--layout", "1x4", "--json", *base])
        if status:
            refused[strategy] = stderr
        else:
            assert json.loads(stdout.splitlines()[-1])["errors"] == 0, stdout
    assert all("there is nothing to " in text for text in refused.values()), refused
    assert refused.keys() == {"interleaving1", "interleaving2"}  # one model that only infers
    out = str(tmp_path / "plan.py")
    words = ["plan", "--layout", "1x4", "--calibration", "cpu-2core", "--out", out]
    status, stdout, stderr = warm.run([*words, *base])
    assert status == 0, stdout + stderr
    status, stdout, stderr = warm.run(["check", out, "--layout", "1x4", "--json", *base])
    assert status == 0 and json.loads(stdout.splitlines()[-1])["ok"], stdout + stderr


@pytest.mark.parametrize("learns", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_usual_page_of_the_documents(learns, warm, tmp_path):
    """In docs/write_an_algorithm.md: it runs, and it learns."""
    text = (Path(__file__).parents[2] / "docs" / "write_an_algorithm.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (page,) = [block for block in blocks if "REINFORCE" in block]
    (tmp_path / "mine.py").write_text(page, encoding="utf-8")
    words = ["--preset", "arithmetic", "--runs", tmp_path / "runs", "--name", "x", "optimizer.actor_lr=3e-4"]
    small = ["iterations=1", "rollout_batch=8", "mini_batch=32", "eval.prompts="]
    words += ["iterations=6", "eval.every=6"] if learns else small
    status, _, stderr = warm.run(["train", "--algorithm", tmp_path / "mine.py", *words])
    assert status == 0, stderr
    assert metrics(tmp_path / "runs" / "x")[-1]["actor_grad_norm"] > 0
    if learns:
        before, after = (row["mean@1"] for row in evaluations(tmp_path / "runs" / "x"))
        assert after > before + 0.1
