"""A supervisor changes nothing about a program but what is said of its end. No MPI here; 4 s in all."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_spmd.runtime.failure.records import Record
from rlhf_spmd.runtime.failure.supervise import exit_message
from tests.run_mpi import environment_alone
from tests.started import is_alive

LIMIT_S = 60.0
PREFIX = "rlhf_spmd: error: "
PROGRAM = """
import os, signal, sys, time
from rlhf_spmd.runtime.failure.supervise import supervised
signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # which the background of a shell ignores
record = supervised()
"""
READY = "print(os.getpid(), os.getppid(), flush=True)\n"
LAUNCHED = {"PMI_SIZE": "4", "PMI_RANK": "2"}  # what a launcher tells


def run(body: str, stdin: str = "") -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", PROGRAM + body]
    return subprocess.run(
        command, input=stdin, capture_output=True, encoding="utf-8", timeout=LIMIT_S, env=environment_alone()
    )


def start(body: str, **more: str) -> tuple[subprocess.Popen, int]:
    """Starts a supervised rank. Returns the supervisor, or its front if a launcher seems to have started it, and the
    process of the rank, which has written READY."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + READY + body],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment_alone(**more),
    )
    child, parent = map(int, process.stdout.readline().split())
    assert process.pid == (parent_of(parent) if LAUNCHED.items() <= more.items() else parent)
    return process, child


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


FAMILY = """
import subprocess, tempfile, threading
from rlhf_spmd.runtime.failure import records
program = "import os, time\\nif os.fork(): os._exit(0)\\nos.setsid()\\nif os.fork(): os._exit(0)\\ntime.sleep(600)"
restarts = "trap '' TERM HUP INT; while :; do sleep 600 & sleep 600 & wait; done"
commands = ["sleep", "600"], [sys.executable, "-S", "-c", program], ["sh", "-c", restarts]
for command in commands:
    subprocess.Popen(command, start_new_session=True)
    subprocess.Popen(command)
threading.Thread(target=time.sleep, args=(600,)).start()
file = tempfile.mkstemp(prefix=records.prefix(), dir=records.SHARED_MEMORY)[1]
folder = tempfile.mkdtemp(prefix=records.prefix())
print(file, folder, flush=True)
time.sleep(0.3)
"""


def marked(name: str) -> list[int]:
    """Returns the processes that live and have this in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"MARK={name}".encode() in (folder / "environ").read_bytes().split(b"\0") and is_alive(int(folder.name)):
                found.append(int(folder.name))
        except OSError:
            pass
    return found


ENDS = {
    "its work": ("supervise.leave(0)", None, {}),
    "an exit": ("os._exit(3)", None, LAUNCHED),
    "kill -9 of the rank": ("print('ready', flush=True); time.sleep(600)", "rank", LAUNCHED),
    "kill -9 of its supervisor": ("print('ready', flush=True); time.sleep(600)", "supervisor", LAUNCHED),
    "kill -9 of what the launcher started": ("print('ready', flush=True); time.sleep(600)", "front", LAUNCHED),
}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_that_a_rank_started_outlives_it(end, tmp_path):
    """In sessions of its own, forked twice, or restarted whenever it ends; its pipes would keep mpiexec waiting."""
    body, victim, launched = ENDS[end]
    process, child = start(
        f"from rlhf_spmd.runtime.failure import supervise\n{FAMILY}\n{body}", MARK=str(tmp_path), **launched
    )
    files = process.stdout.readline().split()
    if victim:
        assert process.stdout.readline() == "ready\n" and len(marked(str(tmp_path))) >= 10
        os.kill({"rank": child, "supervisor": parent_of(child), "front": process.pid}[victim], signal.SIGKILL)
    process.communicate(timeout=10)
    began = time.monotonic()
    while marked(str(tmp_path)) or any(map(os.path.exists, files)):
        assert time.monotonic() - began < 5, marked(str(tmp_path))
        time.sleep(0.02)


@pytest.mark.parametrize("victim", ["supervisor", "front"])
def test_a_killed_supervisor_is_told_by_what_is_left(victim, tmp_path):
    """The launcher still has another process, so it is not the one that ends the job."""
    script = tmp_path / "rank.py"
    script.write_text(
        PROGRAM + "record.describe(rank=1, size=2, host='a-host')\n" + READY + "time.sleep(60)", encoding="utf-8"
    )
    launcher = subprocess.Popen(
        ["bash", "-c", f"sleep 60 & {sys.executable} {script}; echo $?; sleep 2; kill %1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment_alone(**LAUNCHED),
    )
    child, parent = map(int, launcher.stdout.readline().split())
    os.kill(parent if victim == "supervisor" else parent_of(parent), signal.SIGKILL)
    stdout, stderr = launcher.communicate(timeout=LIMIT_S)
    assert stderr.count(PREFIX) == 1 and "the supervisor of rank 1 of 2 (host a-host, process " in stderr, stderr
    assert stdout == f"{128 + signal.SIGKILL}\n"


def test_a_thread_that_is_left_keeps_no_rank_alive():
    found = run(
        "import atexit, threading\nfrom rlhf_spmd.runtime.failure.supervise import leave\n"
        "atexit.register(print, 'handled')\nthreading.Thread(target=time.sleep, args=(600,)).start()\nleave(5)"
    )
    assert (found.returncode, found.stdout, found.stderr) == (5, "handled\n", "")


@pytest.mark.parametrize(("work", "ended"), [("record.leave(4)", 4), ("pass", 7)])
def test_the_status_of_the_work_counts(work, ended):
    """A handler at the exit may end the process with its own."""
    found = run(f"import atexit\natexit.register(os._exit, 7)\n{work}\nsys.exit(4)")
    assert (found.returncode, found.stdout, found.stderr) == (ended, "", "")


def test_a_rank_that_is_done_has_to_end():
    """Perhaps MPI_Finalize waits for ever. The status is that of the work."""
    program = PROGRAM.replace(
        "record =", "from rlhf_spmd.runtime.failure import supervise\nsupervise.LEAVE_S = 0.3\nrecord ="
    )
    body = "record.describe(host='a-host')\nrecord.leave(4)\nrecord.leave_undone()\n"  # as at the exit
    body += "time.sleep(600)"  # a handler of a library
    command = [sys.executable, "-c", program + body]
    found = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=LIMIT_S, env=environment_alone())
    assert found.returncode == 4 and found.stderr.count("\n") == 1, found.stderr
    assert "note: rank 0 of 1 (host a-host, process " in found.stderr and "it was killed" in found.stderr


def test_what_torch_keeps_compiled_is_removed_unless_the_user_names_a_folder(tmp_path, monkeypatch):
    """transformers imports torch's compiler, which makes this folder then."""
    body = "folder = os.environ['TORCHINDUCTOR_CACHE_DIR']\nos.makedirs(folder)\nprint(folder)"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert not Path(run(body).stdout.strip() or "/").exists()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    assert Path(run(body).stdout.strip()) == tmp_path / "mine" and (tmp_path / "mine").is_dir()


@pytest.mark.parametrize("is_done", [True, False])
def test_a_supervisor_that_is_stopped_does_not_keep_the_job(is_done, monkeypatch):
    """The front ends it: with the status of the work, or with a message if there is none."""
    soon = "from rlhf_spmd.runtime.failure import supervise\nsupervise.LEAVE_S, supervise.LINGER_S = 0.3, 0.1\nrecord ="
    monkeypatch.setattr(sys.modules[__name__], "PROGRAM", PROGRAM.replace("record =", soon))
    body = "record.describe(host='a-host')\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n"
    body += "print(flush=True)\nsignal.sigwait({signal.SIGUSR1})\nrecord.leave(3)\nos._exit(3)"
    process, child = start(body, **LAUNCHED)
    process.stdout.readline()
    supervisor = parent_of(child)
    os.kill(supervisor, signal.SIGSTOP)
    os.kill(child, signal.SIGUSR1 if is_done else signal.SIGKILL)
    _, told = process.communicate(timeout=LIMIT_S)
    assert process.returncode == (3 if is_done else 128 + signal.SIGKILL) and not is_alive(supervisor)
    assert told.startswith(f"rlhf_spmd: {'note' if is_done else 'error'}: the supervisor of rank "), told
    assert "did not end in 0 s after the work of its rank: it was killed" in told and told.count("\n") == 1, told


def test_a_crash_shows_where_python_was():
    found = run("def hurt():\n    os.kill(os.getpid(), signal.SIGSEGV)\nhurt()")
    assert found.returncode == 128 + signal.SIGSEGV
    assert "was ended by SIGSEGV before it had joined the other ranks" in found.stderr and "in hurt" in found.stderr
    assert "its own code failed" in found.stderr


def test_a_signal_from_somebody_is_not_the_code():
    """As `kill -TERM` with the process id that `status` shows."""
    found = run("os.kill(os.getpid(), signal.SIGTERM)")
    assert found.returncode == 128 + signal.SIGTERM and "SIGTERM before it had joined the other ranks" in found.stderr
    assert "another process, or its own code, sent it" in found.stderr and "code failed" not in found.stderr


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


def test_a_stop_is_no_signal():
    """Ctrl-Z and `fg`, a debugger, a frozen control group: for longer than the wait for a signal takes."""
    body = "from rlhf_spmd.runtime.failure.supervise import next_signal\nimport signal\n"
    body += "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})\n"
    body += "print(flush=True)\nfor _ in range(2):\n"
    body += "    print(next_signal({signal.SIGTERM, signal.SIGUSR1}, 0.3), flush=True)"
    process = subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, encoding="utf-8")
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    process.send_signal(signal.SIGCONT)
    assert process.stdout.readline() == "None\n"
    process.send_signal(signal.SIGUSR1)
    told = process.communicate(timeout=LIMIT_S)[0]
    assert told == f"Received(number={signal.SIGUSR1:d}, code=0, process={os.getpid()})\n"


def test_a_kill_by_the_kernel_is_told_from_a_users_and_shared_memory_is_named():
    record = Record.create()
    record.signal = signal.SIGKILL
    kernels, users = (exit_message(record, 2**30, by_kernel=by, free_bytes=2**30) for by in (True, False))
    assert "memory ran out; this one used 1.0 GiB at most" in kernels and "a user or the batch system" in users
    record.signal = signal.SIGBUS
    few, many = (exit_message(record, 0, by_kernel=False, free_bytes=free) for free in (2**20, 2**30))
    assert "/dev/shm is too small: 1 MiB were free, and MPI may need 24 MiB" in few and "its own code failed" in many
