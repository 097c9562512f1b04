"""Reward functions: how they are found, and that every way to fail is told in one message."""

import sys
import textwrap

import numpy as np
import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.rewards.function import RewardFunction, load_reward_function, source_file
from rlhf_spmd.runtime.rewards.styles import bind

PROMPTS, RESPONSES = ["a", "b", "c"], ["x", "yy", "zzz"]


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("_rlhf_spmd_named", "mine", "neighbour")):
            del sys.modules[name]


def write(tmp_path, source, name="mine.py"):
    path = tmp_path / name
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return path


def bound(function, name="f"):
    return RewardFunction(name, bind(function))


def refusal(action, *words):
    with pytest.raises(UserError) as caught:
        action()
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


# ---- loading


def test_a_file_and_a_module_give_the_same_scores(tmp_path, monkeypatch):
    write(tmp_path, "scale = 2.0\n", "neighbour.py")
    path = write(
        tmp_path,
        """
        import neighbour
        def longer(prompts, responses):
            return [neighbour.scale * len(response) for response in responses]
        """,
    )
    from_file = load_reward_function(f"{path}:longer")
    assert from_file(PROMPTS, RESPONSES) == [2.0, 4.0, 6.0]
    monkeypatch.chdir(tmp_path)
    from_module = load_reward_function("mine:longer")
    assert from_module(PROMPTS, RESPONSES) == [2.0, 4.0, 6.0]
    assert from_module.name == "mine:longer" and from_module([], []) == []


@pytest.mark.parametrize("spec", ["mine", "mine:", ":f", "mine:f()", "", "mine.py"])
def test_a_name_without_both_parts(spec):
    refusal(lambda: load_reward_function(spec), repr(spec), "module:function", "file.py:function")


def test_its_file_is_found_without_loading_it(tmp_path, monkeypatch):
    """Also by ranks that do not score, and where the working folder is not on the import path."""
    path = write(tmp_path, "raise RuntimeError")
    (tmp_path / "mine_package").mkdir()
    write(tmp_path / "mine_package", "raise RuntimeError", "inner.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    assert source_file("mine:score") == source_file(f"{path}:score") == path
    assert source_file("mine.py:score").resolve() == path
    assert source_file("mine_package.inner:score") == tmp_path / "mine_package" / "inner.py"
    for spec in ("no_such:score", "no_such.inner:score", "mine.inner:score", "no_such.py:score", "sys:intern"):
        assert source_file(spec) is None, spec


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(:\n", ["SyntaxError", "mine.py, line 1"]),
        ("x = 1\nraise ValueError('no table')\n", ["ValueError: no table", "line 2", "raise ValueError"]),
        ("import sys\nsys.exit(3)\n", ["SystemExit: 3", "line 2"]),
        ("def reword(p, r): ...\ndef _rewar(p, r): ...\n", ["has no 'reward'", "did you mean 'reword'?"]),
        ("", ["has no 'reward'", "name a function"]),
        ("reward = 3\n", ["it is 3, not a function"]),
        ("def reward(p, r): ...\n", ["no parameter of it receives the response (p, r)", "call one responses, "]),
        (
            "def reward(responses, model): ...\n",
            ["asks for model", "not a column of the data set", "rename the parameter"],
        ),
    ],
)
def test_files_that_do_not_load(tmp_path, source, words):
    path = write(tmp_path, source)
    refusal(lambda: load_reward_function(f"{path}:reward"), f"'{path}:reward'", *words)


# ---- calling


@pytest.mark.parametrize(
    "scores",
    [
        [1, 0.5, True],
        (1.0, 0.5, 1.0),
        np.array([1.0, 0.5, 1.0], dtype=np.float32),
        [np.float32(1), np.float64(0.5), np.array(1)],
    ],
)
def test_what_counts_as_scores(scores):
    result = bound(lambda prompts, responses: scores)(PROMPTS, RESPONSES)
    assert result == [1.0, 0.5, 1.0] and {type(score) for score in result} == {float}


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ([1.0, 2.0], ["2 scores for 3 responses"]),
        (None, ["a NoneType"]),
        ((number for number in (1, 2, 3)), ["a generator", "return a list"]),
        (np.ones((3, 1)), ["[1.0]", "response 'x'", "finite number"]),
        ([1.0, 2.0, "3"], ["'3'", "response 'zzz'", "finite number"]),
        ([1.0, float("nan"), 2.0], ["nan", "response 'yy'", "finite number"]),
        ([1e39, 1.0, 2.0], ["1e+39", "response 'x'", "finite number"]),
        ([10**400, 1.0, 2.0], ["response 'x'", "finite number"]),
        ([1j, 1.0, 2.0], ["1j", "finite number"]),
    ],
)
def test_what_does_not(scores, words):
    reward = bound(lambda prompts, responses: scores, "mine:f")
    refusal(lambda: reward(PROMPTS, RESPONSES), "reward function mine:f returned", *words)


def test_what_a_function_raises_is_told_with_the_line_and_the_rows(tmp_path):
    path = write(
        tmp_path,
        """
        import json
        def score(response):
            return {"x": 1.0, "yy": json.loads("2")}[response]
        def reward(prompts, responses):
            return [score(response) for response in responses]
        """,
    )
    reward = load_reward_function(f"{path}:reward")
    words = ["KeyError: 'zzz'", "mine.py, line 4", 'return {"x": 1.0', "a batch of 3 responses"]
    refusal(lambda: reward(PROMPTS, RESPONSES), f"reward function {path}:reward raised", *words)
