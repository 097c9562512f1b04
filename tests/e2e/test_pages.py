"""Toy pages (tests/toy_pages/), trained as a user would: the same numbers on 1, 3 and 4 ranks and in other layouts.

No file but the page knows them: one has no generation, one has pairs, one has a second generating call and groups of 16
samples, which three data-parallel ranks cut.
"""

import functools
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.folders import given_rows, write_model
from tests.page_runs import REALLOCATION, assert_same, evaluations, metrics, resume, timeless, trained, weights

PAGES = Path(__file__).parents[1] / "toy_pages"
LR = {"given_responses": ("student",), "pairs": ("policy",), "group": ("actor",)}
SIZES = {
    "given_responses": ("rollout_batch=8", "mini_batch=4"),
    "pairs": ("rollout_batch=8", "mini_batch=4"),
    "group": ("rollout_batch=4", "samples_per_prompt=16", "mini_batch=32"),
}
PLACEMENTS = {"3 ranks": (3, ()), "tp 2 and pp 2": (4, REALLOCATION), "4 ranks": (4, ())}
FAST = {"given_responses": ("3 ranks",), "pairs": ("tp 2 and pp 2",), "group": ("3 ranks",)}


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    """Returns models for any of the pages, and a data set with the columns of all."""
    folder = tmp_path_factory.mktemp("pages")
    rows = [row | {"answer": row["completion"]} for row in given_rows(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write_model(folder / "lm", seed=1)
    write_model(folder / "judge", head="scalar", seed=2)
    shared = [f"data.prompts={folder / 'rows.jsonl'}", "data.max_prompt=8", "generation.max_new_tokens=10"]
    return [*shared, "iterations=2", "micro_batch=3", "deadline_s=100", "--model", str(folder / "lm")]


def of_page(page: str, options: list[str], *more: str) -> list[str]:
    """Returns the command line of a page."""
    judge = [f"models.judge={Path(options[-1]).parent / 'judge'}"] if page == "group" else []
    rates = [f"optimizer.{role}_lr=1e-3" for role in LR[page]]
    return ["--algorithm", str(PAGES / f"{page}.py"), *SIZES[page], *rates, *judge, *options, *more]


@pytest.fixture(scope="module")
def alone(options, tmp_path_factory):
    """Returns alone(page): its run on one rank, made once, with a checkpoint after each iteration."""
    folder = tmp_path_factory.mktemp("alone")
    more = ("checkpoint.every=1", "checkpoint.keep=2")
    return functools.cache(lambda page: trained(of_page(page, options, *more), 1, folder / page))


@pytest.mark.parametrize("which", ["fast", pytest.param("others", marks=pytest.mark.slow)])
@pytest.mark.parametrize("page", SIZES)
def test_a_page_trains_to_the_same_numbers_anywhere(page, which, options, alone, tmp_path):
    one = alone(page)
    assert (one / "algorithm.py").read_text(encoding="utf-8") == (PAGES / f"{page}.py").read_text(encoding="utf-8")
    rows = metrics(one)
    assert len(rows) == 2 and weights(one) and rows[0] != rows[1]
    for name in FAST[page] if which == "fast" else PLACEMENTS.keys() - FAST[page]:
        num_ranks, more = PLACEMENTS[name]
        run = trained(of_page(page, options, *more), num_ranks, tmp_path / name.replace(" ", "-"))
        assert_same(run, one, name)


def test_a_page_is_resumed_from_its_run_folder(alone, tmp_path):
    """Its second iteration has the bits of a run that was not stopped."""
    whole = alone("group")
    half = shutil.copytree(whole, tmp_path / "half")
    shutil.rmtree(half / "checkpoints" / "iteration-000002")
    resume(half, 1)
    assert timeless(whole) == timeless(half)
    assert weights(whole) == weights(half)


@pytest.mark.parametrize("page", [pytest.param(one, marks=[pytest.mark.slow] * (one != "group")) for one in SIZES])
def test_check_and_plan_know_a_page(page, options, warm):
    """Every strategy places it or says why not, and the planner finds a plan that check accepts."""
    judge = [f"models.judge={Path(options[-1]).parent / 'judge'}"] if page == "group" else []
    base = ["--algorithm", str(PAGES / f"{page}.py"), *SIZES[page], *judge, "--model", options[-1]]
    refused = {}
    for strategy in ("flattening", "interleaving1", "interleaving2", "separation", "reallocation"):
        status, stdout, stderr = warm.run(["check", strategy, "--layout", "1x4", "--json", *base])
        if status:
            refused[strategy] = stderr
        else:
            assert json.loads(stdout.splitlines()[-1])["errors"] == 0, stdout
    assert {"flattening", "reallocation"}.isdisjoint(refused)
    nothing = "there is nothing to "
    assert all(nothing in text for text in refused.values()), refused
    assert {"interleaving1", "interleaving2"} <= refused.keys()  # one model that only infers, or none
    assert ("separation" in refused) == (page == "given_responses")
    out = str(Path(options[-1]).parent / f"{page}-plan.py")
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
