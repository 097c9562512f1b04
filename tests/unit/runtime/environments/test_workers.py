"""Worker processes of environments: many episodes at once, time limits, crashes, and no process left."""

import time
from pathlib import Path

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.environments import workers as environment_workers
from rlhf_spmd.runtime.environments.workers import EnvironmentWorkers
from tests import environments

FILES = Path(environments.__file__).parent
LIMIT_S = 60.0


@pytest.fixture
def pools():
    made = []

    def pools(name: str, num: int = 1, columns=("rounds",)) -> EnvironmentWorkers:
        made.append(EnvironmentWorkers(f"{FILES}/{name}" if not name.startswith("/") else name, columns, num=num))
        return made[-1]

    yield pools
    processes = [worker.process.pid for pool in made for worker in pool._workers]
    for pool in made:
        pool.close()
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


def answered(pool: EnvironmentWorkers, *tickets: int) -> list[dict]:
    found, began = {}, time.monotonic()
    while not found.keys() >= {*tickets}:
        assert time.monotonic() < began + LIMIT_S
        found |= dict(pool.answers(0.5, tickets))
    return [found[ticket] for ticket in tickets]


def begin(pool: EnvironmentWorkers, episode: int, **columns) -> dict:
    start = {"columns": columns, "prompt": "", "messages": None, "seed": 1, "sample_seed": 2}
    (found,) = answered(pool, pool.ask(episode, {"do": "begin", "start": start}, timeout_s=LIMIT_S))
    return found


def call(name: str, **arguments) -> dict:
    return {"do": "call", "name": name, "arguments": arguments, "columns": {}}


@pytest.mark.timed
def test_calls_of_many_episodes_run_at_once(pools):
    """Sync ones, too; answers come in the order in which they are done."""
    pool, began = pools("functions.py:TOOLS"), time.monotonic()
    naps = [pool.ask(episode, call("nap", seconds=0.4)) for episode in range(10)]
    (quick,) = answered(pool, pool.ask(10, call("add", a=1, b=1)))
    assert quick["step"]["back"] == "2" and time.monotonic() - began < 0.35
    assert {one["step"]["back"] for one in answered(pool, *naps)} == {"rested"}
    assert time.monotonic() - began < 2.0


def test_objects_are_kept_for_their_episodes(pools):
    pool = pools("functions.py:Saved", 2)
    assert all(begin(pool, episode)["opening"]["add"] == "" for episode in range(4))
    assert {len(worker.episodes) for worker in pool._workers} == {2}
    for by in (1, 10):
        found = answered(pool, *(pool.ask(episode, call("count", by=by + episode)) for episode in range(4)))
    assert [one["step"]["back"] for one in found] == ["11", "13", "15", "17"] and found[1]["state"] == {"total": 13}
    pool.ask(1, {"do": "load", "state": {"total": 5}})
    assert answered(pool, pool.ask(1, {"do": "reward"}))[0]["reward"] == 5
    pool.leave(2)
    assert not pool.holds(2) and pool.holds(1)


@pytest.mark.timed
def test_a_call_whose_time_is_over_leaves_its_worker_to_the_others(pools):
    pool = pools("functions.py:TOOLS")
    process = pool._workers[0].process.pid
    (late,) = answered(pool, pool.ask(0, call("nap", seconds=600), timeout_s=0.2))
    assert late["timed_out"] and pool._workers[0].hanging == 1
    assert answered(pool, pool.ask(0, call("add", a=1, b=1)))[0]["step"]["back"] == "2"
    pool.leave(0)  # nothing else is in it, so it is replaced
    assert pool._workers[0].process.pid != process
    assert answered(pool, pool.ask(1, call("add", a=1, b=1)))[0]["step"]["back"] == "2"


@pytest.mark.timed
def test_an_async_tool_that_blocks_its_worker(pools, tmp_path, monkeypatch):
    text = '"""A tool."""\nimport time\n\n\nasync def block(x: int) -> int:\n    """Blocks."""\n    time.sleep(600)\n'
    (tmp_path / "e.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(environment_workers, "GRACE_S", 0.2)
    pool = pools(f"{tmp_path}/e.py:block")
    one, other = pool.ask(0, call("block", x=1), timeout_s=0.2), pool.ask(1, call("none"), timeout_s=60)
    late, gone = answered(pool, one, other)
    assert late == {"timed_out": True} and gone == {"gone": True} and not pool.holds(1)


def test_a_worker_that_ends_loses_its_episodes_and_is_replaced(pools):
    pool = pools("functions.py:Rounds")
    for episode in range(2):
        begin(pool, episode, rounds=3)
    (broken,) = answered(pool, pool.ask(0, {"do": "step", "text": "exit"}))
    assert broken == {"broken": "its worker process exited with status 3"} and not pool.holds(1)
    assert begin(pool, 1, rounds=3)["opening"]["add"] == ""
    (raised,) = answered(pool, pool.ask(1, {"do": "step", "text": "break"}))
    assert raised["broken"].endswith("RuntimeError: broken") and "functions.py" in raised["broken"] and pool.holds(1)


def test_the_call_that_ends_its_worker_is_found_among_those_that_ran(pools):
    """They are asked again while nothing else runs in their worker, what was asked behind them waits, and the others
    are not charged with it."""
    pool = pools("functions.py:TOOLS")
    messages = [call("nap", seconds=0.2), call("end", after_s=0.05), call("nap", seconds=0.2)]
    found = answered(pool, *(pool.ask(episode, message) for episode, message in enumerate(messages)))
    assert found == [{"gone": True}] * 3
    again = [pool.ask(episode, message) for episode, message in enumerate([*messages, call("add", a=1, b=1)])]
    assert [len(worker.waiting) for worker in pool._workers] == [3]
    one, end, other, late = answered(pool, *again)
    assert one["step"]["back"] == "rested" and end == {"broken": "its worker process exited with status 5"}
    assert other == late == {"gone": True, "unsent": True}
    other, late = answered(pool, pool.ask(2, messages[2]), pool.ask(3, call("add", a=1, b=1)))
    assert (other["step"]["back"], late["step"]["back"]) == ("rested", "2") and not any(pool._workers[0].tickets)


def test_a_question_that_waits_may_be_dropped(pools):
    pool = pools("functions.py:TOOLS")
    naps = [call("nap", seconds=0.3), call("nap", seconds=0.3)]
    pool.ask(2, call("end", after_s=0.05))
    first = [pool.ask(episode, message) for episode, message in enumerate(naps)]
    assert answered(pool, *first) == [{"gone": True}] * 2
    first = [pool.ask(episode, message) for episode, message in enumerate(naps)]
    pool.drop(first[1])
    assert answered(pool, first[0])[0]["step"]["back"] == "rested"
    assert answered(pool, pool.ask(4, call("add", a=1, b=1)))[0]["step"]["back"] == "2"


def test_a_large_answer_takes_time_by_its_length_only(pools):
    pool = pools("functions.py:TOOLS")
    (found,) = answered(pool, pool.ask(0, call("shout", text="x" * 2**24)))
    assert found["step"]["back"] == "X" * 2**24


def test_a_result_of_another_form_is_the_error_of_the_run(pools, tmp_path):
    text = "class E:\n    def reset(self): ...\n    def step(self, text): return 3\n"
    (tmp_path / "e.py").write_text(text, encoding="utf-8")
    pool = pools(f"{tmp_path}/e.py:E")
    begin(pool, 0)
    (found,) = answered(pool, pool.ask(0, {"do": "step", "text": "a"}))
    assert found["misused"] == "step() returned an int: return (observation, reward, done)"


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
