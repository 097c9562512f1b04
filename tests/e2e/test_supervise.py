"""A supervisor changes nothing about a program but what is said of its end. No MPI here; a second in all."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.run_mpi import environment_alone

LIMIT_S = 60.0
PREFIX = "rlhf_spmd: error: "
PROGRAM = (
    "import os, signal, sys, time\nfrom rlhf_spmd.runtime.guard.supervise import supervised\nflight = supervised()\n"
)
READY = "print(os.getpid(), os.getppid(), flush=True)\n"


def run(body: str, stdin: str = "") -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", PROGRAM + body]
    return subprocess.run(
        command, input=stdin, capture_output=True, encoding="utf-8", timeout=LIMIT_S, env=environment_alone()
    )


def start(body: str, **more: str) -> tuple[subprocess.Popen, int]:
    """-> the supervisor, and the process of the rank, which has written READY."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + READY + body],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment_alone(**more),
    )
    child, parent = map(int, process.stdout.readline().split())
    assert parent == process.pid
    return process, child


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("status", [0, 1, 2, 130])
def test_streams_and_status_pass_through(status):
    found = run(f"print(sys.stdin.read().upper())\nprint('e', file=sys.stderr)\nsys.exit({status})", stdin="abc")
    assert (found.returncode, found.stdout, found.stderr) == (status, "ABC\n", "e\n")


def test_a_fatal_signal_is_told_with_its_place():
    found = run(
        "flight.describe(rank=2, size=4, host='a-host', num_instructions=9)\n"
        "flight.begin(b'iteration 3: Run actor_train', 3, 7)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    assert found.returncode == 128 + signal.SIGKILL and found.stderr.count(PREFIX) == 1
    for words in ("rank 2 of 4 (host a-host, process ", "SIGKILL in iteration 3: Run actor_train (instruction 7 of 9)"):
        assert words in found.stderr, found.stderr


def test_a_crash_shows_where_python_was():
    found = run("def hurt():\n    os.kill(os.getpid(), signal.SIGSEGV)\nhurt()")
    assert found.returncode == 128 + signal.SIGSEGV
    assert "was ended by SIGSEGV before it had joined the other ranks" in found.stderr and "in hurt" in found.stderr
    assert "its own code failed" in found.stderr


def test_a_signal_from_somebody_is_not_the_code():
    """As `kill -TERM` with the process id that `status` shows."""
    found = run("os.kill(os.getpid(), signal.SIGTERM)")
    assert found.returncode == 128 + signal.SIGTERM and "SIGTERM before it had joined the other ranks" in found.stderr
    assert "another process sent it" in found.stderr and "code failed" not in found.stderr


@pytest.mark.parametrize(
    ("launched", "name"), [({}, "rank 0 of 1"), ({"PMI_SIZE": "4", "PMI_RANK": "2"}, "rank 2 of 4")]
)
def test_who_has_not_met_the_others_has_the_launchers_number(launched, name):
    process, child = start("time.sleep(60)", **launched)
    os.kill(child, signal.SIGKILL)
    _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGKILL
    assert f"{name} (host " in stderr and "was ended by SIGKILL before it had joined the other ranks" in stderr, stderr


@pytest.mark.parametrize(("status", "told"), [(0, 1), (3, 3)])
def test_an_exit_that_says_nothing_is_told(status, told):
    found = run(f"flight.describe(rank=1, size=2, host='a-host')\nos._exit({status})")
    assert found.returncode == told and found.stderr.count(PREFIX) == 1
    assert "rank 1 of 2 (host a-host, process " in found.stderr and f"exited with {status}" in found.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_passed_on(number):
    process, _ = start(
        f"signal.signal({number:d}, lambda *_: (print('got it', flush=True), sys.exit(5)))\n"
        # short sleeps: a signal that comes just before one waits for its end
        "print('ready', flush=True)\nfor _ in range(600): time.sleep(0.1)"
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.communicate(timeout=LIMIT_S) == ("got it\n", "") and process.returncode == 5


def test_a_signal_that_was_asked_for_is_no_news():
    process, _ = start("time.sleep(60)")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=LIMIT_S) == ("", "") and process.returncode == 128 + signal.SIGTERM


def test_a_rank_ends_with_its_supervisor():
    process, child = start("time.sleep(60)")
    process.kill()
    process.communicate(timeout=LIMIT_S)
    began = time.monotonic()
    while is_alive(child):
        assert time.monotonic() - began < LIMIT_S
        time.sleep(0.01)


def test_a_supervisor_ends_with_its_launcher():
    """The launcher is a shell that waits; without one (a shell that is left) a job goes on."""
    command = f"{sys.executable} -c '{PROGRAM}{READY}time.sleep(60)' & wait"
    launcher = subprocess.Popen(
        ["bash", "-c", command],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env=environment_alone(PMI_SIZE="2", PMI_RANK="0"),
    )
    child, parent = map(int, launcher.stdout.readline().split())
    launcher.kill()
    launcher.wait()
    began = time.monotonic()
    while is_alive(child) or is_alive(parent):
        assert time.monotonic() - began < LIMIT_S
        time.sleep(0.01)
