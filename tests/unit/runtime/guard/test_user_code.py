"""Code of the user inside the rank's process: what it changes is changed back, and what it raises is one message."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.algorithm import load_algorithm
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.runtime.guard import signals, streams, user_code
from rlhf_spmd.runtime.guard.user_code import OF_PROCESS, OF_TORCH, guarded
from rlhf_spmd.runtime.observe.node_files import new_file, open_file
from rlhf_spmd.runtime.observe.position_board import Board, board_bytes
from rlhf_spmd.runtime.rewards.function import RewardFunction, load_reward_function
from rlhf_spmd.runtime.rewards.styles import bind
from tests.run_mpi import environment_alone


@pytest.fixture
def said(monkeypatch):
    """Returns what is said about user code."""
    said = []
    notes = user_code.Notes()
    notes.tell = said.append
    monkeypatch.setattr(user_code, "notes", notes)
    return said


kept = []


def enter(context):
    kept.append(context)
    context.__enter__()


CHANGES = {
    "the working folder": lambda: os.chdir("/"),
    "sys.stdout": lambda: setattr(sys, "stdout", None),
    "sys.stderr": lambda: setattr(sys, "stderr", open(os.devnull, "w", encoding="utf-8")),  # noqa: SIM115
    "the umask": lambda: os.umask(0o123),
    "the recursion limit": lambda: sys.setrecursionlimit(500),
    "the blocked signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
    "the handler of SIGTERM": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "the handler of SIGPIPE": lambda: signal.signal(signal.SIGPIPE, signal.SIG_DFL),
    "the alarm of SIGALRM": lambda: signal.alarm(100),
    "descriptor 0": lambda: os.close(streams.INPUT),
    "torch's inference mode": lambda: enter(torch.inference_mode()),
    "torch's mode of gradients": lambda: torch.set_grad_enabled(False),
    "torch's default device": lambda: torch.set_default_device("meta"),
    "torch's default dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch's autocast on cpu": lambda: enter(torch.autocast("cpu")),
    "torch's number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch's deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "torch's precision of products": lambda: torch.set_float32_matmul_precision("medium"),
    "torch's treatment of denormal numbers": lambda: torch.set_flush_denormal(True),
    "torch.backends.cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
}

DEAR, SLOW = "torch's deterministic algorithms", pytest.mark.slow  # its setter imports torch's compiler


def state():
    process = [setting.read() for setting in OF_PROCESS]
    return process, [setting.read(torch) for setting in OF_TORCH], signal.alarm(0), os.fstat(0).st_ino


@pytest.mark.parametrize("what", [pytest.param(one, marks=SLOW if one == DEAR else []) for one in CHANGES])
@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
def test_what_a_call_changes_is_changed_back(what, raises, said):
    before = state()
    for _ in range(2):
        with suppress(ZeroDivisionError), guarded("f"):
            CHANGES[what]()
            assert not raises or 1 / 0
        assert state() == before
    assert said == [f"f changed {what}: changed back"]


def test_what_is_put_right_inside_is_nobodys_business(said):
    with guarded("f"):
        folder, dtype = os.getcwd(), torch.get_default_dtype()
        os.chdir("/")
        torch.set_default_dtype(torch.float64)
        with torch.inference_mode(), torch.device("meta"), open(os.devnull, "w", encoding="utf-8") as nowhere:
            before, sys.stdout = sys.stdout, nowhere
            sys.stdout = before
        torch.set_default_dtype(dtype)
        os.chdir(folder)
    assert said == []


def test_one_note_for_all_of_a_call_and_an_error_for_what_stays(said):
    with guarded("f"):
        os.umask(0o123)
        torch.set_grad_enabled(False)
    assert said == ["f changed the umask, torch's mode of gradients: changed back"]
    mode = torch.device("meta")
    with pytest.raises(UserError, match="g changed torch's default device, which can't be changed back"), guarded("g"):
        mode.__enter__()
    mode.__exit__(None, None, None)


def test_a_call_costs_few_system_calls(monkeypatch):
    """50 us at most, of which these are most."""
    with guarded("f"):
        pass
    calls = []

    def counted(function):
        return lambda *given: calls.append(function) or function(*given)

    for name in ("fstat", "getcwd", "umask", "read", "getpid", "dup2", "waitpid", "close"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    with guarded("f"):
        pass
    assert len(calls) <= 16, calls


# ---- forks


def test_a_child_that_comes_back_is_ended(said, capfd):
    for _ in range(3):
        with guarded("f"):
            child = os.fork()
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    with guarded("f"):
        pass
    assert child and capfd.readouterr().err.count("f came back in a child of os.fork") == 1
    with guarded("f"):
        pass
    assert not user_code.children.dead, "they are buried"
    with pytest.raises(ChildProcessError):
        os.waitpid(child, 0)
    with guarded("f"):
        if not (child := os.fork()):
            sys.exit(3)  # it means to end
        status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 3 and capfd.readouterr().err == "" and said == []


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
        with pytest.raises(UserError, match=rf"r.py:score raised {kind.__name__}: no .*on response 1 'b'"):
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


def test_an_import_is_a_call_too(tmp_path, monkeypatch, said):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "moves.py"
    path.write_text("import os\nos.chdir('/')\ndef f(prompts, responses): return [0.0]\n", encoding="utf-8")
    before = os.getcwd()
    load_reward_function(f"{path}:f")
    assert os.getcwd() == before and said == [f"importing {path} changed the working folder: changed back"]


# ---- who says it


def test_of_the_ranks_of_a_node_one_says_it():
    path, inode = new_file(board_bytes(2))
    boards = [Board(open_file(path, inode), rank=rank, node_ranks=(0, 1), node=0, num_nodes=1) for rank in range(2)]
    os.unlink(path)
    assert [board.first_to_say(text) for text in ("a", "b") for board in boards] == [True, False] * 2
    assert [board.claim() for board in boards] == [True, False], "the claim is another byte"
    assert Board(None, rank=0, node_ranks=(0,), node=0, num_nodes=1).first_to_say("a")


def test_a_page_may_change_things_and_raise_anything_too(tmp_path, said):
    """In the two functions that no table of test_page_mistakes.py has."""
    path = tmp_path / "mine.py"
    source = (Path(__file__).parents[3] / "toy_pages" / "group.py").read_text(encoding="utf-8")
    added = (
        "\nimport os\ndef problem(options):\n    os.chdir('/')\n    return ''\ndef refused(options, can_end): 1 / 0\n"
    )
    path.write_text(source + added, encoding="utf-8")
    page, before = load_algorithm(str(path)), os.getcwd()
    assert page.problem(page.options()) == "" and os.getcwd() == before
    assert said == ["algorithm mine: problem() changed the working folder: changed back"]
    with pytest.raises(UserError, match=r"algorithm mine: refused\(\) raised ZeroDivisionError: .*mine.py, line"):
        page.refused(page.options(), can_end=True)
