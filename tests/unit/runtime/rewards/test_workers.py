"""Worker processes for reward functions: scores as in the rank itself, deadlines, crashes, and no process left."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.rewards.function import load_reward_function
from rlhf_spmd.runtime.rewards.styles import Scored
from rlhf_spmd.runtime.rewards.workers import RewardWorkers
from tests.started import is_alive

TIMEOUT_S = 1.0
SOURCE = """
import asyncio, ctypes, os, signal, subprocess, sys, threading, time

def length(prompts, responses, place):
    print("scored", flush=True)
    return [len(response) / 3 + 0.1 * one for response, one in zip(responses, place)]

def some(completions, **columns):
    return {"scores": [None if len(text) == 1 else 1.5 for text in completions], "extra_logs": {"n": [0.1, 2.0][:1]}}

async def each(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.001)
    return {"score": float(solution_str == ground_truth), "size": len(solution_str)} if solution_str != "b" else 0.0

def sleeps(prompts, responses):
    if responses == ["bb"]:
        children = [subprocess.Popen(["sleep", "600"], start_new_session=new) for new in (False, True)]
        open(__file__ + ".child", "w").write(" ".join(str(child.pid) for child in children))
        time.sleep(600)
    return [float(len(response)) for response in responses]

def naps(prompts, responses):
    time.sleep(600 if responses == ["bb"] else 0)
    return [0.0] * len(responses)

def crashes(prompts, responses):
    if "bb" in responses:
        ctypes.string_at(0)
    return [1.0] * len(responses)

def exits(prompts, responses):
    if "bb" in responses:
        os._exit(3)
    return [1.0] * len(responses)

def interrupts(prompts, responses):
    if "bb" in responses:
        raise KeyboardInterrupt
    return [1.0] * len(responses)

def closes_all(prompts, responses):
    if "bb" in responses:
        os.closerange(3, 1000)
    return [1.0] * len(responses)

def raises(prompts, responses):
    return [1.0 / (len(response) - 2) for response in responses]

def nothing_of_the_job(prompts, responses):
    heavy = [name for name in ("torch", "mpi4py") if name in sys.modules]
    launcher = [name for name in os.environ if name.startswith(("PMI", "OMPI_", "SLURM_PROCID"))]
    assert not heavy and not launcher and os.environ["CUDA_VISIBLE_DEVICES"] == "", (heavy, launcher)
    assert threading.current_thread() is threading.main_thread()
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    rung = []
    while not rung:
        time.sleep(0.01)
    return [float(os.getppid())] * len(responses)

def waits_for_a_signal(prompts, responses):
    open(responses[0], "w").write(str(os.getpid()))
    time.sleep(0.5)
    return [7.0]
"""
ROWS = Scored(
    ["p", "q", "r", "s", "t"],
    ["a", "bb", "b", "", "\udc80\n"],
    [[1], [2, 3], [3], [], [5]],
    [
        {"place": place, "data_source": "d", "ground_truth": "b", "reward_model": None, "completion_ids": "column"}
        for place in range(5)
    ],
)
COLUMNS = list(ROWS.columns[0])


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "r.py").write_text(SOURCE, encoding="utf-8")
    return tmp_path / "r.py"


@pytest.fixture
def workers(file):
    """Returns workers(names, ...): a pool, which is closed; none of its processes is there afterwards."""
    made = []

    def workers(*names: str, num: int = 2, timeout_s: float = 0.0, **more) -> RewardWorkers:
        made.append(RewardWorkers([f"{file}:{name}" for name in names], COLUMNS, num=num, timeout_s=timeout_s, **more))
        return made[-1]

    yield workers
    processes = [worker.process.pid for workers in made for worker in workers.pool._workers]
    for workers in made:
        workers.pool.close()
    assert not any(map(is_alive, processes))


@pytest.mark.parametrize("num", [1, 3])
def test_scores_are_those_of_the_rank_itself(num, file, workers, capfd):
    """Also numbers for the log, None, and texts that no encoding has; two calls of one pool."""
    names = ("length", "some", "each")
    alone = [load_reward_function(f"{file}:{name}", COLUMNS).score(ROWS.row(row)) for name in names for row in range(5)]
    pool = workers(*names, num=num)
    for _ in range(2):
        found, late = pool.score(ROWS)
        assert late == set() and [one[0][row] for one in found for row in range(5)] == [one[0][0] for one in alone]
    assert found[0][0] == load_reward_function(f"{file}:length", COLUMNS).score(ROWS)[0]
    assert found[1] == ([None, 1.5, None, 1.5, 1.5], {"some_n": [0.1] * 5})
    assert found[2][1] == {"each_size": [1.0, 2.0, None, 0.0, 2.0]}
    assert capfd.readouterr().out.count("scored") == 10 + 6  # those of this process
    assert pool.score(Scored([], [])) == ([([], {})] * 3, set())


@pytest.mark.timed
def test_a_response_that_takes_too_long(file, workers):
    """It alone has no score; its worker, and what that started, are gone; the other rows do not wait for it."""
    pool = workers("sleeps", timeout_s=TIMEOUT_S)
    before = {worker.process.pid for worker in pool.pool._workers}
    began = time.monotonic()
    assert pool.score(ROWS) == ([([1.0, None, 1.0, 0.0, 2.0], {})], {1})
    assert TIMEOUT_S <= time.monotonic() - began < 10 * TIMEOUT_S
    for child in map(int, Path(f"{file}.child").read_text(encoding="utf-8").split()):
        while is_alive(child):
            assert time.monotonic() - began < 10 * TIMEOUT_S
            time.sleep(0.01)
    assert len(pool.pool._workers) == 2 and {worker.process.pid for worker in pool.pool._workers} != before
    assert pool.score(ROWS.row(0)) == ([([1.0], {})], set())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("crashes", r"r.py:crashes: its worker process was ended by SIGSEGV on response 'bb' \(prompt 'q'\): it, or"),
        ("exits", r"r.py:exits: its worker process exited with status 3 on response 'bb' \(prompt 'q'\): it, or"),
        ("interrupts", r"r.py:interrupts raised KeyboardInterrupt .* on response 'bb' \(prompt 'q'\): fix the func"),
        ("closes_all", r"r.py:closes_all: its worker process exited with status 1 on response 'bb' \(prompt 'q'"),
        # either of two rows, which two workers have at once
        ("raises", r"r.py:raises raised ZeroDivisionError: .*1.0 / \(len.* on response '(bb|.udc80.n)' .*: fix the"),
    ],
)
def test_an_error_is_one_message_with_function_and_row(name, says, workers):
    with pytest.raises(UserError, match=says):
        workers("length", name).score(ROWS)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import no_such_module\ndef f(prompts, responses): ...\n", "importing .* ModuleNotFoundError.*: install no_s"),
        ("def f(prompts, responses, colour): ...\n", "asks for colour, which is not a column of the data set"),
        ("import os\nos._exit(4)\n", "process for the reward functions .*r.py:f exited with status 4 while it load"),
    ],
)
def test_a_file_that_cannot_be_loaded(source, says, file, workers):
    file.write_text(source, encoding="utf-8")
    with pytest.raises(UserError, match=says):
        workers("f")


def test_a_worker_is_no_rank(workers, monkeypatch):
    """It sees no launcher, no GPU, no torch and no MPI; SIGALRM works."""
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("SLURM_PROCID", "1")
    found, _ = workers("nothing_of_the_job").score(ROWS)
    assert found[0][0] == [float(os.getpid())] * 5


def test_signals_of_the_launcher_are_left_to_the_rank(workers, tmp_path):
    """SIGTERM and SIGUSR1 ask the rank for a checkpoint at the end of an iteration that still needs scores."""
    path, pool = tmp_path / "pid", workers("waits_for_a_signal", num=1)
    sender = (
        f"until [ -s {path} ]; do sleep 0.01; done; for name in TERM USR1 INT HUP; do kill -$name $(cat {path}); done"
    )
    with subprocess.Popen(["bash", "-c", sender]) as process:
        assert pool.score(Scored([""], [str(path)]))[0][0][0] == [7.0]
        assert process.wait() == 0


@pytest.mark.timed
@pytest.mark.parametrize(("timeout_s", "beats"), [(0.0, False), (600.0, True)])
def test_the_watch_hears_of_work_and_of_deadlines_only(timeout_s, beats, workers):
    """Workers that sleep without a deadline are as quiet as a rank that sleeps; those with one will not for ever."""
    heard = []
    pool = workers("naps", num=1, timeout_s=timeout_s, beat=lambda: heard.append(time.monotonic()))
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError))
    signal.alarm(2)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        pool.score(ROWS.row(1))
    late = [at for at in heard if at > began + 1.0]
    assert bool(late) == beats and heard
