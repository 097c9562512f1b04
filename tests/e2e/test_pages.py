"""Toy pages (tests/toy_pages/), trained as a user would: the same numbers on 1, 3 and 4 ranks and in other layouts.

No file but the page knows them: one has no generation, one has pairs, one has a second generating call and groups of 16
samples, which three data-parallel ranks cut.
"""

import json
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.folders import WORDS, write_model
from tests.run_mpi import mpi_command, mpi_environment, run_limited

PAGES = Path(__file__).parents[1] / "toy_pages"
LIMIT_S = 120.0
LR = {"given_responses": ("student",), "pairs": ("policy",), "group": ("actor",)}
SIZES = {
    "given_responses": ("rollout_batch=8", "mini_batch=4"),
    "pairs": ("rollout_batch=8", "mini_batch=4"),
    "group": ("rollout_batch=4", "samples_per_prompt=16", "mini_batch=32"),
}
REALLOCATION = ("--strategy", "reallocation", "strategy.training_tp=2", "strategy.training_pp=2")
PLACEMENTS = {"3 ranks": (3, ()), "4 ranks": (4, ()), "tp 2 and pp 2": (4, REALLOCATION)}
TIMED = ("iteration_s", "generate_s", "gen_tokens_per_s")


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    """Models for any of the pages, and a data set with the columns of all."""
    folder = tmp_path_factory.mktemp("pages")
    rows = []
    for index in range(24):
        words = [WORDS[(7 * index + 3 * place) % len(WORDS)] for place in range(12)]
        row = {"prompt": words[: 1 + index % 5], "answer": words[3 : 5 + index % 6], "chosen": words[2 : 4 + index % 4]}
        rows.append({name: " ".join(some) for name, some in (row | {"rejected": words[5 : 7 + index % 5]}).items()})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_model(folder / "lm", seed=1)
    write_model(folder / "judge", head="scalar", seed=2)
    shared = [f"data.prompts={folder / 'rows.jsonl'}", "data.max_prompt=8", "generation.max_new_tokens=10"]
    return [*shared, "iterations=2", "micro_batch=3", "deadline_s=100", "--runs", str(folder / "runs"), "--model"] + [
        str(folder / "lm")
    ]


def trained(page: str, num_ranks: int, more: tuple[str, ...], options: list[str], name: str) -> Path:
    """The run folder of a page on this number of ranks."""
    folder = Path(options[-1]).parent
    judge = [f"models.judge={folder / 'judge'}"] if page == "group" else []
    rates = [f"optimizer.{role}_lr=1e-3" for role in LR[page]]
    launcher = mpi_command(num_ranks) if num_ranks > 1 else []
    command = [*launcher, sys.executable, "-m", "rlhf_spmd", "train", "--algorithm", str(PAGES / f"{page}.py")]
    command += [*SIZES[page], *rates, *judge, *options, "--name", name, *more]
    status, stdout, stderr = run_limited(command, limit_s=LIMIT_S, environment=mpi_environment(OMP_NUM_THREADS="1"))
    assert status == 0, stdout + stderr
    return folder / "runs" / name


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, list]:
    """Every float32 master of the last checkpoint that one rank has, sorted: their order differs between layouts."""
    last, found = max((run / "checkpoints").glob("iteration-*")), []
    for path in last.glob("rank-*.safetensors"):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                if "master" in name:
                    found += file.get_tensor(name).flatten().tolist()
    return sorted(found)


@pytest.mark.parametrize("page", SIZES)
def test_a_page_trains_to_the_same_numbers_anywhere(page, options):
    one = trained(page, 1, (), options, f"{page}-1")
    assert (one / "algorithm.py").read_text() == (PAGES / f"{page}.py").read_text()
    expected, masters = metrics(one), weights(one)
    assert len(expected) == 2 and masters and expected[0] != expected[1]
    for name, (num_ranks, more) in PLACEMENTS.items():
        run = trained(page, num_ranks, more, options, f"{page}-{name.replace(' ', '-')}")
        for mine, other in zip(metrics(run), expected, strict=True):
            assert mine.get("tokens_sha256") == other.get("tokens_sha256"), name
            for key in other.keys() - {*TIMED, "tokens_sha256", "moved_bytes", "moved_messages", "parity_max_abs"}:
                assert mine[key] == pytest.approx(other[key], rel=1e-5, abs=1e-5), (name, key)
        assert weights(run) == pytest.approx(masters, rel=1e-4, abs=2e-5), name


def test_a_page_is_resumed_from_its_run_folder(options):
    """The page is read from the run folder, even if the user's file is gone."""
    whole = trained("group", 1, (), options, "whole")
    half = trained("group", 1, ("iterations=1",), options, "half")
    command = [sys.executable, "-m", "rlhf_spmd", "train", "--resume", str(half), "iterations=2"]
    status, stdout, stderr = run_limited(command, limit_s=LIMIT_S, environment=mpi_environment(OMP_NUM_THREADS="1"))
    assert status == 0, stdout + stderr
    timeless = [[{k: v for k, v in row.items() if k not in TIMED} for row in metrics(run)] for run in (whole, half)]
    assert timeless[0] == timeless[1]
    assert weights(whole) == weights(half)


@pytest.mark.parametrize("page", SIZES)
def test_check_and_plan_know_a_page(page, options):
    """Every strategy places it or says why not, and the planner finds a plan that check accepts."""
    judge = [f"models.judge={Path(options[-1]).parent / 'judge'}"] if page == "group" else []
    base = ["--algorithm", str(PAGES / f"{page}.py"), *SIZES[page], *judge, "--model", options[-1]]
    refused = {}
    for strategy in ("flattening", "interleaving1", "interleaving2", "separation", "reallocation"):
        command = [sys.executable, "-m", "rlhf_spmd", "check", strategy, "--layout", "1x4", *base]
        status, stdout, stderr = run_limited(command, limit_s=LIMIT_S)
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
    command = [sys.executable, "-m", "rlhf_spmd", "plan", "--layout", "1x4", "--calibration", "cpu-2core", "--out", out]
    status, stdout, stderr = run_limited([*command, *base], limit_s=LIMIT_S)
    assert status == 0, stdout + stderr
    command = [sys.executable, "-m", "rlhf_spmd", "check", out, "--layout", "1x4", *base]
    status, stdout, stderr = run_limited(command, limit_s=LIMIT_S)
    assert status == 0 and json.loads(stdout.splitlines()[-1])["ok"], stdout + stderr
