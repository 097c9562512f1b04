"""Worker processes of environments: many episodes at once, time limits, crashes, and no process left."""

import time
from pathlib import Path

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.environments import workers as workers_module
from rlhf_spmd.runtime.environments.workers import environment_workers
from rlhf_spmd.runtime.workers.pool import WorkerPool
from tests import environments

FILES = Path(environments.__file__).parent
LIMIT_S = 60.0


@pytest.fixture
def pools():
    made = []

    def pools(name: str, num: int = 1, columns=("rounds",)) -> WorkerPool:
        made.append(environment_workers(f"{FILES}/{name}" if not name.startswith("/") else name, columns, num=num))
        return made[-1]

    yield pools
    processes = [worker.process.pid for pool in made for worker in pool._workers]
    for pool in made:
        pool.close()
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


def ask(pool: WorkerPool, key: int, do: str, *, limit_s: float = 0.0, is_alone: bool = False, **message) -> int:
    message |= {"do": do, "limit_s": limit_s, "environment": "", "episode_id": "e", "row": 0}
    return pool.ask(key, message, timeout_s=limit_s, is_alone=is_alone)


def begin(pool: WorkerPool, key: int, **columns) -> int:
    start = {"columns": columns, "prompt": "", "messages": None, "seed": 1, "sample_seed": 2}
    return ask(pool, key, "begin", start=start)


def call(pool: WorkerPool, key: int, name: str, *, limit_s: float = 0.0, is_alone: bool = False, **arguments) -> int:
    return ask(pool, key, "call", limit_s=limit_s, is_alone=is_alone, name=name, arguments=arguments)


def answered(pool: WorkerPool, *tickets: int) -> list[dict]:
    found, began = {}, time.monotonic()
    while not found.keys() >= {*tickets}:
        assert time.monotonic() < began + LIMIT_S
        found |= dict(pool.answers(0.5, tickets))
    return [found[ticket] for ticket in tickets]


def said(pool: WorkerPool, *tickets: int) -> list[str]:
    return [answer["step"]["observation"] for answer in answered(pool, *tickets)]


@pytest.mark.timed
def test_calls_of_many_episodes_run_at_once(pools):
    """Sync ones, too; answers come in the order in which they are done."""
    pool, began = pools("functions.py:TOOLS"), time.monotonic()
    naps = [call(pool, key, "nap", seconds=0.4) for key in range(10)]
    assert said(pool, call(pool, 10, "add", a=1, b=1)) == ["2"] and time.monotonic() - began < 0.35
    assert said(pool, *naps) == ["rested"] * 10
    assert time.monotonic() - began < 2.0


def test_objects_are_kept_for_their_episodes(pools):
    pool = pools("functions.py:Total", 2)
    answered(pool, *(begin(pool, key) for key in range(4)))
    for by in (1, 10):
        found = said(pool, *(call(pool, key, "count", by=by + key) for key in range(4)))
    assert found == ["11", "13", "15", "17"] and {len(worker.keys) for worker in pool._workers} == {2}
    pool.release(2)
    assert answered(pool, ask(pool, 2, "reward"), ask(pool, 1, "reward")) == [{"gone": True}, {"reward": 13}]


@pytest.mark.timed
def test_a_call_whose_time_is_over_leaves_its_worker_to_the_others(pools):
    pool = pools("functions.py:TOOLS")
    process = pool._workers[0].process.pid
    (late,) = answered(pool, call(pool, 0, "nap", limit_s=0.2, seconds=600))
    assert late["timed_out"]
    assert said(pool, call(pool, 0, "add", a=1, b=1)) == ["2"]
    pool.release(0)  # nothing else is in it, so it is replaced
    assert pool._workers[0].process.pid != process
    assert said(pool, call(pool, 1, "add", a=1, b=1)) == ["2"]


@pytest.mark.timed
def test_an_async_tool_that_blocks_its_worker(pools, tmp_path, monkeypatch):
    text = '"""A tool."""\nimport time\n\n\nasync def block(x: int) -> int:\n    """Blocks."""\n    time.sleep(600)\n'
    (tmp_path / "e.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(workers_module, "GRACE_S", 0.2)
    pool = pools(f"{tmp_path}/e.py:block")
    late, lost = answered(pool, call(pool, 0, "block", limit_s=0.2, x=1), call(pool, 1, "none", limit_s=60))
    assert late == {"timed_out": True} and "timed out" in lost["lost"]


def test_a_question_that_is_alone_waits_and_is_waited_for(pools):
    pool = pools("functions.py:TOOLS")
    nap, alone = call(pool, 0, "nap", seconds=0.2), call(pool, 1, "nap", is_alone=True, seconds=0.2)
    later, dropped = call(pool, 2, "add", a=1, b=1), call(pool, 3, "add", a=1, b=1)
    pool.drop(dropped)
    assert [len(worker.asked) for worker in pool._workers] == [1] and len(pool._waiting) == 2
    assert said(pool, nap) == ["rested"] and len(pool._waiting) == 1
    assert said(pool, alone, later) == ["rested", "2"]


SPOILS = '''
import os, stat
def spoil(text: str) -> str:
    """Writes into every socket.

    Args:
        text: That it writes.
    """
    for number in range(3, 300):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, text.encode())
        except OSError:
            pass
    return "done"
'''


@pytest.mark.parametrize("text", ["garbage\n", "\0\0\0\4null", "\0\0\0\2{}", '\0\0\0\16{"ticket": 99}'])
def test_what_is_no_answer_is_said_of_its_worker(text, pools, tmp_path):
    (tmp_path / "e.py").write_text(SPOILS, encoding="utf-8")
    pool = pools(f"{tmp_path}/e.py:spoil")
    assert "sent another message than an answer" in answered(pool, call(pool, 0, "spoil", text=text))[0]["lost"]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import no_such_module\n", "environment .*ModuleNotFoundError.*install no_such_module"),
        ("import os\nos._exit(4)\n", "worker process for environment .* exited with status 4 while it loaded it"),
    ],
)
def test_a_file_that_cannot_be_loaded(source, says, pools, tmp_path):
    (tmp_path / "e.py").write_text(source, encoding="utf-8")
    with pytest.raises(UserError, match=says):
        pools(f"{tmp_path}/e.py:x")
