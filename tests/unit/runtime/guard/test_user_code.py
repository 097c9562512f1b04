"""Code of the user inside the rank's process: what it raises is one message, and a child that it forks is ended."""

import mmap
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.algorithm import load_algorithm
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.runtime.guard import signals, user_code
from rlhf_spmd.runtime.guard.user_code import guarded
from rlhf_spmd.runtime.observe.node_files import new_file, open_file
from rlhf_spmd.runtime.observe.position_board import Board, board_bytes
from rlhf_spmd.runtime.rewards.function import RewardFunction, load_reward_function
from rlhf_spmd.runtime.rewards.styles import bind
from tests.run_mpi import environment_alone

# ---- forks


def test_a_child_that_comes_back_is_ended(monkeypatch, capfd):
    """However it comes back, which is said once; one that means to end has its status and says nothing."""
    monkeypatch.setattr(user_code, "_has_said", mmap.mmap(-1, 1))
    process = os.getpid()

    def status(raised: BaseException | None) -> int:
        with guarded("f"):
            if not (child := os.fork()) and raised:
                raise raised
        assert os.getpid() == process
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert [status(SystemExit(code)) for code in (3, None, "why")] == [3, 0, 1] and capfd.readouterr().err == ""
    assert [status(raised) for raised in (None, ZeroDivisionError(), KeyboardInterrupt())] == [1, 1, 1]
    assert capfd.readouterr().err == f"{user_code.NOTE}f {user_code.FORKED}\n"


def test_what_is_forked_is_ended_by_signals_that_this_process_only_notes():
    program = """
import os, signal, sys, time
from rlhf_spmd.runtime.guard.signals import Asked
asked = Asked()
asked.listen(signal.SIGTERM)
for _ in range(20):
    child = os.fork()
    if not child:
        time.sleep(60)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
os.kill(os.getpid(), signal.SIGTERM)
print(asked.take())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        env=environment_alone(),
        check=False,
    )
    assert (done.stdout, done.stderr) == ("['SIGTERM']\n", "")


# ---- exceptions


class Mine(BaseException):
    pass


@pytest.mark.parametrize("kind", [Mine, GeneratorExit, SystemExit, KeyboardInterrupt])
def test_whatever_a_function_raises_is_one_message(kind, monkeypatch):
    monkeypatch.setattr(signals, "_interrupts", [])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    signals.remember_interrupts()

    def score(prompts, responses):
        if "b" in responses:
            raise kind("no")
        return [0.0] * len(responses)

    function = RewardFunction("r.py:score", bind(score))
    try:
        with pytest.raises(UserError, match=rf"r.py:score raised {kind.__name__}: no .*rows 0 to 1"):
            function(["p", "q"], ["a", "b"])
        if kind is KeyboardInterrupt:  # now it is the user's wish
            with suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            with pytest.raises(KeyboardInterrupt):
                function(["p", "q"], ["a", "b"])
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_exception_that_cannot_print_itself():
    class Mute(Exception):
        def __str__(self):
            raise Mine

    def score(prompts, responses):
        raise Mute

    with pytest.raises(UserError, match=r"r.py:score raised Mute \(.*test_user_code.py, line \d+: raise Mute\)"):
        RewardFunction("r.py:score", bind(score))(["p"], ["a"])


@pytest.mark.parametrize("kind", ["GeneratorExit", "Mine"])
def test_the_same_of_files_and_place(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "mine.py"
    source = "class Mine(BaseException): pass\ndef place(workload, cluster): raise {0}('no')\n"
    path.write_text(source.format(kind), encoding="utf-8")
    with pytest.raises(UserError, match=rf"strategy mine: place\(\) raised {kind}: no .*mine.py, line 2"):
        load_strategy(str(path)).placement(None, None, {})
    path.write_text(source.format(kind) + f"raise {kind}('no')\n", encoding="utf-8")
    with pytest.raises(UserError, match=f"importing {path} raised {kind}: no"):
        load_reward_function(f"{path}:place")
    with pytest.raises(UserError, match=f"cannot be imported: {kind}: no"):
        load_strategy(str(path))


# ---- who says it


def test_of_the_ranks_of_a_node_one_says_it():
    path, inode = new_file(board_bytes(2))
    boards = [Board(open_file(path, inode), rank=rank, node_ranks=(0, 1), node=0, num_nodes=1) for rank in range(2)]
    os.unlink(path)
    assert [board.first_to_say(text) for text in ("a", "b") for board in boards] == [True, False] * 2
    assert [board.claim() for board in boards] == [True, False], "the claim is another byte"
    assert Board(None, rank=0, node_ranks=(0,), node=0, num_nodes=1).first_to_say("a")


def test_a_note_is_said_once_and_by_the_rank_that_may(capfd):
    notes = user_code.Notes()
    notes.tell("a")
    notes.tell("a")
    notes.say_if(lambda text: text != "b")
    notes.tell("b")
    assert capfd.readouterr().err == "rlhf_spmd: note: a\n"


def test_a_page_may_raise_anything_too(tmp_path):
    """In the function that no table of test_page_mistakes.py has."""
    path = tmp_path / "mine.py"
    source = (Path(__file__).parents[3] / "toy_pages" / "group.py").read_text(encoding="utf-8")
    path.write_text(source + "\ndef refused(options, can_end): 1 / 0\n", encoding="utf-8")
    page = load_algorithm(str(path))
    with pytest.raises(UserError, match=r"algorithm mine: refused\(\) raised ZeroDivisionError: .*mine.py, line"):
        page.refused(page.options(), can_end=True)
