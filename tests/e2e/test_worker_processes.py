"""Reward functions in worker processes, as users run them: on two ranks, with a deadline, and when a rank is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_spmd.runtime.failure.processes import below
from tests.folders import write_all
from tests.page_runs import evaluations, metrics, timeless, trained, weights
from tests.run_mpi import mpi_command, mpi_environment

LIMIT_S = 120.0
SOURCE = """
import os, subprocess, time

def letters(prompts, responses):
    return [sum(map(ord, response)) % 97 / 50 - 1 for response in responses]

def helped(prompts, responses):
    subprocess.Popen(["sleep", "611"], start_new_session=True)
    return slow(prompts, responses)

def slow(prompts, responses):  # to the first prompt only, so that the same rows are late everywhere
    with open(__file__ + ".workers", "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(600 if prompts[0] == os.environ.get("SLOW_PROMPT") else 0)
    return [1.0] * len(responses)
"""


def words_in(folder: Path) -> list[str]:
    (folder / "r.py").write_text(SOURCE, encoding="utf-8")
    return [*write_all(folder), f"reward_function={folder / 'r.py'}:letters", "iterations=2"]


@pytest.fixture
def words(tmp_path) -> list[str]:
    return words_in(tmp_path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """Returns a run on two ranks, without workers."""
    folder = tmp_path_factory.mktemp("alone")
    return trained(words_in(folder), 2, folder / "alone")


def test_the_same_numbers_as_without_workers(words, alone, tmp_path):
    """To the bit: weights, metrics and samples, on two ranks, each with two workers."""
    helped = trained([*words, "reward_workers=2"], 2, tmp_path / "helped")
    assert timeless(alone) == timeless(helped) and weights(alone) == weights(helped)
    assert (alone / "samples.txt").read_text(encoding="utf-8") == (helped / "samples.txt").read_text(encoding="utf-8")


def test_a_deadline_ends_responses_and_not_the_run(words, warm, tmp_path):
    """A rank waits for longer than deadline_s, which is not a hang; the run says that it is not exact."""
    text = json.loads((tmp_path / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[0])["prompt"]
    functions = f"reward_function={tmp_path / 'r.py'}:letters,{tmp_path / 'r.py'}:slow"
    limits = ["reward_workers=2", "reward_timeout_s=4", "deadline_s=2", "num_samples=0"]
    options = [*words, functions, *limits, "--runs", str(tmp_path), "--name", "run"]
    status, stdout, stderr = warm.run(["train", "--json", *options], 2, SLOW_PROMPT=text)
    assert status == 0, stdout + stderr
    rows, last = metrics(tmp_path / "run"), json.loads(stdout.splitlines()[-1])
    num = sum(row["reward_timeouts"] for row in rows)
    assert num > 0 and last["reward_timeouts"] == num
    assert stdout.count("(reward_timeouts), so this run cannot be repeated exactly") == 1
    assert all(row["score_slow"] == 1.0 for row in rows)  # of the rows that it applies to


def test_a_late_response_of_the_only_function_has_the_score_of_late_ones(words, warm, tmp_path):
    """It is counted, also in evaluations and in the samples shown."""
    text = json.loads((tmp_path / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[0])["prompt"]
    functions = [f"reward_function={tmp_path / 'r.py'}:slow", "reward_on_timeout=-2", "num_samples=1"]
    limits = ["reward_workers=2", "reward_timeout_s=0.5", "iterations=1"]
    limits += [f"eval.prompts={tmp_path / 'prompts.jsonl'}", "eval.num_prompts=1"]
    options = [*words, *functions, *limits, "--runs", str(tmp_path), "--name", "run"]
    status, stdout, stderr = warm.run(["train", "--json", *options], SLOW_PROMPT=text)
    assert status == 0, stdout + stderr
    (row,) = metrics(tmp_path / "run")
    num = int(options_of(tmp_path / "run")["rollout_batch"])
    assert row["reward_timeouts"] > 0
    assert row["score"] == pytest.approx(1.0 - 3.0 * row["reward_timeouts"] / num)
    assert evaluations(tmp_path / "run")[0]["reward_timeouts"] == 1
    assert json.loads(stdout.splitlines()[-1])["reward_timeouts"] == row["reward_timeouts"] + 2 * 1


def options_of(run: Path) -> dict:
    return json.loads((run / "config.json").read_text(encoding="utf-8"))


def test_no_worker_outlives_a_killed_rank(words, tmp_path):
    """kill -9 of a rank while its workers sleep: the job ends, and so do the workers of both ranks, and what a function
    has started there in sessions of its own."""
    text = json.loads((tmp_path / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[0])["prompt"]
    function = f"reward_function={tmp_path / 'r.py'}:helped"
    options = [*words, function, "reward_workers=2", "num_samples=1", "--runs", str(tmp_path), "--name", "run"]
    command = [*mpi_command(2), sys.executable, "-m", "rlhf_spmd", "train", "--json", *options]
    environment = mpi_environment(SLOW_PROMPT=text)
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    ) as job:
        try:
            path = tmp_path / "r.py.workers"
            wait(lambda: path.exists() and path.read_text(encoding="utf-8").endswith("\n"))
            worker = int(path.read_text(encoding="utf-8").splitlines()[0])
            rank = int(Path(f"/proc/{worker}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            mine = [process for process in below(rank, recursive=False) if b"spawn_main" in command_of(process)]
            assert worker in mine and len(mine) == 2
            assert any(command_of(process) == b"sleep\x00611\x00" for process in processes())
            os.kill(rank, signal.SIGKILL)
            stderr = job.communicate(timeout=LIMIT_S)[1]
        finally:
            job.kill()
    assert job.returncode != 0 and "was ended by SIGKILL" in stderr, stderr
    wait(lambda: not any(command_of(process) for process in mine))
    wait(lambda: not any(command_of(process) == b"sleep\x00611\x00" for process in processes()))


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def command_of(process: int) -> bytes:
    """Returns the command of a process; empty for one that has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def wait(condition) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < LIMIT_S
        time.sleep(0.02)
