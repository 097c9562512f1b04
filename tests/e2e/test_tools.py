"""The embedded task with tools (`make demo-tools`): it learns, and its numbers depend neither on ranks nor on workers,
nor on a kill in the middle of a call."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_spmd.__main__ import main
from tests.run_mpi import mpi_command, mpi_environment, run_limited

WORDS = ("--preset", "tools", "num_samples=1")
SMALL = ("iterations=3", "rollout_batch=8", "mini_batch=32", "eval.num_prompts=32", "eval.every=3")
# What depends on seconds: so do the rows that are drawn together, and with them the last bits of the sampler's
# logprobs, which only the parity gate reads.
TIMED = ("iteration_s", "generate_s", "gen_tokens_per_s", "parity_max_abs", "parity_mean_abs")
TIMED += ("answers", "tool_s", "tool_p95_s")  # of those that are not in a journal


def command(ranks: int, *words) -> list[str]:
    return [*mpi_command(ranks), sys.executable, "-m", "rlhf_spmd", "train", *map(str, words)]


def trained(ranks: int, *words, limit_s: float = 120.0) -> str:
    status, stdout, stderr = run_limited(
        command(ranks, *words), limit_s=limit_s, environment=mpi_environment(OMP_NUM_THREADS="1")
    )
    assert status == 0, stdout + stderr
    return stdout


def rows(run: Path, *without: str) -> list[dict]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    return [{name: value for name, value in row.items() if name not in (*TIMED, *without)} for row in found]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    trained(2, *WORDS, *SMALL, "--runs", folder, "--name", "whole", "checkpoint.every=1", "rollouts.every=1")
    return folder / "whole"


def test_episodes_call_tools_and_are_counted(whole):
    found = rows(whole)
    assert len(found) == 3
    for row in found:
        assert 1.0 < row["tool_calls"] < 3.5 and 2.0 < row["turns"] < 4.5
        assert row["tool_timeouts"] == row["calls_repeated"] == 0
        ends = sum(value for name, value in row.items() if name.startswith("end_"))
        assert ends == pytest.approx(1.0) and row["end_completed"] > 0.9
    texts = [path.read_text(encoding="utf-8") for path in (whole / "rollouts").rglob("*.jsonl")]
    samples = [json.loads(line) for text in texts for line in text.split("\n")[:-1]]
    first = next(row for row in samples if row["scores"] == 1)
    assert 0 < sum(first["drawn"]) < len(first["drawn"])  # what tools have answered is there, and was not drawn
    assert first["end"] == "completed" and [bool(turn["calls"]) for turn in first["turns"]][-2:] == [True, False]


def test_episodes_are_shown_by_turns(whole, capsys):
    """Of an iteration, and of the samples before and after training."""
    assert main(["rollouts", str(whole), "--where", "scores=1"]) == 0
    *lines, _, result = capsys.readouterr().out.rstrip().split("\n")
    assert max(map(len, lines)) <= 80 and json.loads(result)["matching"] > 0
    assert sum(line.startswith("  1 call   lookup") for line in lines) > 0 and "    ended: completed" in lines
    (sample,) = map(json.loads, (whole / "samples.jsonl").read_text(encoding="utf-8").rstrip().split("\n"))
    assert all("ended: " in sample[when] and " 1 " in sample[when] for when in ("before", "after"))
    assert main(["report", str(whole), "--out", str(whole / "report.html")]) == 0
    page = (whole / "report.html").read_text(encoding="utf-8")
    assert page.count('class="text turns"') == 2
    shown = page.partition("<details>")[0]
    assert all(f">{name}<" in shown for name in ("turns", "tool_calls", "tool_failures", "reward"))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "more"), [(1, ()), (4, ("environment_workers=2",)), (2, ("environment_workers=3",))])
def test_tokens_do_not_depend_on_ranks_and_workers(whole, ranks, more):
    run = whole.with_name(f"on-{ranks}-{len(more)}")
    trained(ranks, *WORDS, *SMALL, "--runs", run.parent, "--name", run.name, *more)
    assert [row["tokens_sha256"] for row in rows(run)] == [row["tokens_sha256"] for row in rows(whole)]
    if ranks == 2:
        assert rows(run) == rows(whole)


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 40])
def test_a_kill_in_the_middle_of_calls(whole, lines):
    """The journal has some answers of the second iteration when all ranks are killed."""
    run = whole.with_name(f"killed-{lines}")
    words = ("--runs", run.parent, "--name", run.name, "checkpoint.every=1", "rollouts.every=1")
    with subprocess.Popen(
        command(2, *WORDS, *SMALL, *words), env=mpi_environment(OMP_NUM_THREADS="1"), stdout=subprocess.DEVNULL
    ) as process:
        end = time.monotonic() + 100
        while not any(
            len(path.read_bytes().split(b"\n")) > lines for path in run.glob("journal/iteration-actor_generate-1-rank*")
        ):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
    time.sleep(6)  # until nothing is left of it
    trained(2, "--resume", run)
    assert rows(run, "calls_repeated") == rows(whole, "calls_repeated")


@pytest.mark.slow
def test_the_whole_demo_learns(tmp_path):
    trained(4, *WORDS, "--runs", tmp_path, "--name", "demo", limit_s=400.0)
    text = (tmp_path / "demo" / "evaluations.jsonl").read_text(encoding="utf-8")
    found = [json.loads(line) for line in text.split("\n")[:-1]]
    assert found[0]["mean@1"] <= 0.4 and found[-1]["mean@1"] >= 0.8
