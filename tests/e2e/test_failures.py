"""Runs that something happens to in the middle: each ends as a whole, within the deadline, with one message that names
rank, host, iteration, call and instruction, and leaves no process. What happens is real: a reward function, which is
code of the user on every rank, does it. Six seconds of start-up each on two idle cores."""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlhf_spmd.runtime.failure.records import read_records
from tests.folders import write_all
from tests.run_mpi import mpi_command, mpi_environment, run_limited

LIMIT_S = 150.0  # for a hang
DEADLINE_S = 5.0
NUM_RANKS = 2
PREFIX = "rlhf_spmd: error: "
WHERE = ("iteration 2: Run reward_infer", "(instruction ")

REWARD = """
import os, resource, signal, socket, time
from mpi4py import MPI

num_calls = 0

def fill_memory():
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used, used))

def hurt():
    {hurt}

def f(prompts, responses):
    global num_calls
    num_calls += 1
    if MPI.COMM_WORLD.rank == {rank} and num_calls == 2:
        print(f"hurt at {{time.time()}}", flush=True)
        hurt()
    return [float(len(response)) for response in responses]
"""
CLOSE = """
    of_launcher = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{os.getppid()}/fd")}
    for name in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{name}"):  # all but the listing itself
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:") and link not in of_launcher:
                connection = socket.socket(fileno=int(name))
                try:
                    if connection.getpeername()[0] == "127.0.0.1":  # of torch.distributed; MPI's own are others
                        connection.shutdown(socket.SHUT_RDWR)
                except OSError:  # it has no peer
                    pass
                connection.detach()
"""


@dataclass(frozen=True)
class Case:
    """What a rank does in its reward function in iteration 2, and what the message must say."""

    hurt: str
    says: tuple[str, ...]
    rank: int = 1
    limit_s: float = 30.0  # from then to the end of the job
    options: tuple[str, ...] = ()


CASES = {
    "kill": Case("os.kill(os.getpid(), signal.SIGKILL)", ("rank 1 of 2 (host ", "was ended by SIGKILL", *WHERE)),
    "kill of a supervisor": Case(
        "os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)",  # the rank's own end comes a moment later
        ("the supervisor of rank 1 of 2 (host ", "was killed (SIGKILL), and the rank with it, in ", *WHERE),
    ),
    "interrupt": Case(
        "os.kill(os.getpid(), signal.SIGINT)", ("interrupted by SIGINT (reported by rank 1 (host ", *WHERE)
    ),
    "stop": Case(
        "os.kill(os.getpid(), signal.SIGSTOP)",
        (
            "rank 1 (host ",
            "did not reach iteration 2: Run actor_train",
            "rank 0 wait for it",
            "is stopped",
            WHERE[0],
        ),
        limit_s=DEADLINE_S + 40,
    ),
    "another collective": Case(
        "__import__('torch').distributed.barrier()",
        ("rank 1 (host ", "did not reach iteration 2: Run actor_train", "rank 0 wait for it", WHERE[0]),
        limit_s=DEADLINE_S + 40,
    ),
    "file too large": Case(
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
        (
            "can't be written: File too large",
            "raise the limit of the size of a file",
            "reported by rank 0 (host ",
            "iteration 2",
        ),
        rank=0,
    ),
    "crash": Case(
        "os.kill(os.getpid(), signal.SIGSEGV)", ("was ended by SIGSEGV", *WHERE, "Current thread", "in hurt")
    ),
    "lost connection": Case(CLOSE, ("lost a connection in iteration 2", "Run actor_train", "rank 1 on ")),
    "exception": Case(
        "raise ValueError('no such luck')", ("r.py:f raised ValueError: no such luck", "reported by rank 1", *WHERE)
    ),
    "memory": Case("fill_memory()", ("ran out of memory", "reported by rank 1", "in iteration ")),
    "not finite": Case(
        "pass", ("the gradient norm is nan", "iteration 1: Run actor_train"), options=("optimizer.actor_lr=1e30",)
    ),
}
FAST = ("kill", "stop")


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    return write_all(tmp_path_factory.mktemp("models"))


def train(overrides: list[str], folder: Path) -> list[str]:
    options = [*overrides, f"reward_function={folder / 'r.py'}:f", f"deadline_s={DEADLINE_S}", "num_samples=0"]
    command = [*mpi_command(NUM_RANKS), sys.executable, "-m", "rlhf_spmd", "train", *options]
    return [*command, "--runs", str(folder), "--name", "run"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in CASES])
def test_one_message_and_nothing_left(name, overrides, tmp_path):
    case = CASES[name]
    (tmp_path / "r.py").write_text(REWARD.format(hurt=case.hurt.strip(), rank=case.rank), encoding="utf-8")
    status, stdout, stderr = run_limited([*train(overrides, tmp_path), *case.options], limit_s=LIMIT_S)
    ended_s = time.time()
    assert status not in (0, None), stderr
    assert stderr.count(PREFIX) == 1 and stderr.startswith(PREFIX) and "Traceback" not in stderr, stderr
    for words in (*case.says, "There is no complete checkpoint in"):
        assert words in stderr, f"{words!r} is not in:\n{stderr}"
    if "hurt at" in stdout:
        assert ended_s - float(stdout.partition("hurt at ")[2].split()[0]) < case.limit_s, stderr
    wait_for(lambda: not remaining(tmp_path / "run"), 10)
    found = status_of("postmortem", tmp_path / "run")
    kept = found["message"]
    assert name != "interrupt" or found["divergence"] is None  # the ranks did make progress
    assert kept == (None if name == "file too large" else stderr.removeprefix(PREFIX).rstrip())


@pytest.mark.parametrize("away", ["deleted", pytest.param("moved", marks=pytest.mark.slow)])
def test_a_run_folder_that_goes_away(away, overrides, tmp_path):
    """The folder, to which the run also writes checkpoints, is removed during the run."""
    run, log = tmp_path / "run", tmp_path / "log"
    command = [*mpi_command(2), sys.executable, "-m", "rlhf_spmd", "train", *overrides, "--runs", str(tmp_path)]
    options = ["--name", "run", "num_samples=0", "iterations=100000", "checkpoint.every=3"]
    with log.open("w", encoding="utf-8") as file:
        launcher = subprocess.Popen([*command, *options], env=mpi_environment(), stdout=file, stderr=file)
        try:
            wait_for(lambda: len(metrics(run)) >= 4)
            if away == "moved":
                run.rename(tmp_path / "elsewhere")
            while run.exists():  # until nothing comes back that was being written
                shutil.rmtree(run, ignore_errors=True)
            assert launcher.wait(LIMIT_S) not in (0, None)
        finally:
            launcher.kill()
            launcher.wait()
    said = log.read_text(encoding="utf-8")
    assert said.count(PREFIX) == 1 and "Traceback" not in said and "Exception" not in said, said
    assert f"the run folder {run} is gone: it was deleted, moved or replaced" in said, said
    assert "reported by rank " in said and "There is no complete checkpoint in" in said, said
    wait_for(lambda: not remaining(run), 10)
    assert not run.exists()


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_of_another_node(stopped, overrides, tmp_path):
    """Two nodes that share no memory, as far as MPI tells: ranks see each other by the store, which rank 0 keeps."""
    hurt = "os.kill(os.getpid(), signal.SIGSTOP)"
    (tmp_path / "r.py").write_text(REWARD.format(hurt=hurt, rank=stopped), encoding="utf-8")
    environment = mpi_environment(MPIR_CVAR_NUM_CLIQUES="2", MPIR_CVAR_CLIQUES_BY_BLOCK="1")
    status, stdout, stderr = run_limited(train(overrides, tmp_path), limit_s=LIMIT_S, environment=environment)
    assert status not in (0, None) and stderr.count(PREFIX) == 1, stderr
    assert time.time() - float(stdout.partition("hurt at ")[2].split()[0]) < 3 * DEADLINE_S + 10
    assert f"rank {stopped} (host " in stderr and "iteration 2: Run actor_train" in stderr, stderr
    wait_for(lambda: not remaining(tmp_path / "run"), 10)


def test_nothing_outlives_the_launcher(overrides, tmp_path):
    """mpiexec itself gets SIGKILL, while `status` is asked about the run."""
    (tmp_path / "r.py").write_text(REWARD.format(hurt="pass", rank=0), encoding="utf-8")
    command = [*train(overrides, tmp_path), "iterations=100000"]
    devnull = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    launcher = subprocess.Popen(command, env=mpi_environment(), **devnull)
    try:
        wait_for(lambda: len(metrics(tmp_path / "run")) >= 5)
        found = status_of("status", tmp_path / "run")
        assert found["state"] == "running" and found["iteration"] >= 5 and found["iterations"] == 100000
        assert [rank["rank"] for rank in found["ranks"]] == [0, 1] and found["slowest_rank"] in (0, 1, None)
        assert all(rank["iteration"] >= 1 and rank["memory_bytes"] > 10**7 for rank in found["ranks"])
        assert all(rank["heartbeat_age_s"] < 10 for rank in found["ranks"])
    finally:
        launcher.kill()
        launcher.wait()
    wait_for(lambda: not remaining(tmp_path / "run"))


def metrics(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if (run / "metrics.jsonl").exists() else []


def wait_for(condition, limit_s: float = 60.0) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit_s
        time.sleep(0.1)


def remaining(run: Path) -> list[int]:
    """Returns ranks and their supervisors that still live, found by what they were started with."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            state = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(run.parent).encode() in words and state not in "ZX":
            found.append(int(folder.name))
    return found


def status_of(verb: str, run: Path) -> dict:
    """Returns the last line of `status` or `postmortem`."""
    status, stdout, stderr = run_limited([sys.executable, "-m", "rlhf_spmd", verb, str(run), "--json"], limit_s=LIMIT_S)
    assert status == 0, stderr
    found = json.loads(stdout.splitlines()[-1])
    assert [rank["process"] for rank in found["ranks"]] == [record.process for record in read_records(run)]
    return found
