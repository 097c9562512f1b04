"""The reward functions of the package, and reward functions written for other programs."""

import asyncio
import sys

import pytest

from rlhf_spmd import rewards
from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.data.reward_function import RewardFunction, load_reward_function
from rlhf_spmd.runtime.data.reward_styles import Scored, style_of

CHAT = [{"role": "user", "content": "2+2?"}]
ROWS = Scored(
    prompts=["2+2?", "3+3?", "4+4?"],
    responses=["4", " 6", "9"],
    tokens=[[4], [1, 6], [9]],
    columns=[
        {"answer": "4", "data_source": "sums", "extra_info": {"index": 0}, "reward_model": {"ground_truth": "4"}},
        {"answer": "6", "data_source": "sums", "extra_info": {"index": 1}, "reward_model": {"ground_truth": "6"}},
        {"answer": "8", "data_source": "sums", "extra_info": {"index": 2}, "reward_model": {"ground_truth": "8"}},
    ],
)
SEEN: list = []


def scores(function, rows: Scored = ROWS) -> list:
    return RewardFunction("mine:f", function).score(rows)[0]


# ---- styles ---------------------------------------------------------------------------------------------------------


def own(prompts, responses, answer, completion_ids, unknown="default"):
    SEEN.append((completion_ids, unknown))
    return [float(response.strip() == right) for response, right in zip(responses, answer, strict=True)]


def trl(prompts, completions, answer, **columns):
    SEEN.append((prompts, completions, columns))
    return [1.0 if right in str(completion) else None for completion, right in zip(completions, answer, strict=True)]


async def trl_async(completions, **columns):
    return {"scores": [float(len(text)) for text in completions]}


async def verl_async(data_source, solution_str, ground_truth):
    return {"score": float(solution_str == ground_truth)}


def verl(data_source, solution_str, ground_truth, extra_info=None):
    SEEN.append((data_source, extra_info))
    return {"score": float(solution_str.strip() == ground_truth), "acc": solution_str == ground_truth, "pred": "x"}


def openrlhf(queries, prompts, labels):
    SEEN.append((queries, labels))
    return {"rewards": [1.0, 2.0, 3.0], "scores": [0, 1, 0], "extra_logs": {"length": [5, 6, 7]}}


@pytest.mark.parametrize(
    ("function", "style", "expected", "seen"),
    [
        (own, "own", [1.0, 1.0, 0.0], [([[4], [1, 6], [9]], "default")]),
        (trl_async, "trl", [1.0, 2.0, 1.0], []),
        (verl_async, "verl", [1.0, 0.0, 0.0], []),
        (verl, "verl", [1.0, 1.0, 0.0], [("sums", {"index": index}) for index in range(3)]),
    ],
)
def test_a_style_is_told_by_the_names_of_the_parameters(function, style, expected, seen):
    SEEN.clear()
    assert style_of(function) == style
    assert scores(function) == expected and seen == SEEN


def test_calls_of_an_async_function_run_concurrently():
    """Each waits until all have begun: one after the other, the first would wait for ever."""
    begun = []

    async def together(data_source, solution_str, ground_truth):
        begun.append(solution_str)
        while len(begun) < 3:
            await asyncio.sleep(0)
        return {"score": float(len(begun))}

    assert scores(together) == [3.0, 3.0, 3.0]


def test_trl_gets_columns_and_conversations():
    SEEN.clear()
    assert scores(trl) == [1.0, 1.0, None]
    prompts, completions, columns = SEEN.pop()
    assert (prompts, completions) == (ROWS.prompts, ROWS.responses)
    assert columns["completion_ids"] == ROWS.tokens and columns["data_source"] == ["sums"] * 3
    chat = Scored(["user: 2+2?"], ["4"], [[4]], [{"prompt": CHAT, "answer": "4"}])
    assert scores(trl, chat) == [1.0]
    assert SEEN[-1][:2] == ([CHAT], [[{"role": "assistant", "content": "4"}]])


def test_further_numbers_are_for_the_log():
    found, logs = RewardFunction("verl.py:verl", verl).score(ROWS)
    assert found == [1.0, 1.0, 0.0] and logs == {"verl_acc": [1.0, 0.0, 0.0]}  # texts are not logged
    rows = Scored(ROWS.prompts, ROWS.responses, ROWS.tokens, [{"labels": index} for index in range(3)])
    SEEN.clear()
    found, logs = RewardFunction("mine:openrlhf", openrlhf).score(rows)
    assert found == [1.0, 2.0, 3.0] and logs == {"openrlhf_length": [5.0, 6.0, 7.0]}
    assert SEEN == [(["2+2?4", "3+3? 6", "4+4?9"], [0, 1, 2])]


@pytest.mark.parametrize(
    ("source", "columns", "words"),
    [
        ("def f(p, r, answr): ...", ["answer"], ["asks for answr", "(answer)", "rename the parameter"]),
        ("def f(completions, solution): ...", [], ["asks for solution", "none besides the prompts"]),
        ("def f(data_source, solution_str, ground_truth): ...", ["data_source"], ["asks for ground_truth"]),
    ],
)
def test_a_column_that_is_missing_is_named_before_the_run(tmp_path, monkeypatch, source, columns, words):
    monkeypatch.setattr(sys, "path", list(sys.path))  # loading adds the file's folder
    (tmp_path / "mine.py").write_text(source + "\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_reward_function(f"{tmp_path / 'mine.py'}:f", columns)
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_error_names_the_row_in_every_style():
    def broken(completions, answer):
        return [1 / (right != "6") for right in answer]

    with pytest.raises(UserError, match=r"ZeroDivisionError.* on response 1 ' 6' \(prompt '3\+3\?'\)"):
        scores(broken)


# ---- of the package -------------------------------------------------------------------------------------------------


def of(function, pairs: list[tuple[str, object]]) -> list[float]:
    responses, answers = zip(*pairs, strict=True)
    return function(["p"] * len(pairs), list(responses), list(answers))


def test_exact_answers():
    assert of(rewards.exact_answer, [(" 4\n", "4"), ("four", "4"), ("4", 4), ("", "4")]) == [1.0, 0.0, 1.0, 0.0]


def test_numeric_answers():
    right = [("it is 1,234.", "#### 1234"), ("5 or 6", "6.0"), ("1e3", 1000), ("so #### -3", "-3"), ("0.50", ".5 0.5")]
    wrong = [("none", "6"), ("6", "six"), ("", "1"), ("6 then 7", "6")]
    assert of(rewards.numeric_answer, right) == [1.0] * 5 and of(rewards.numeric_answer, wrong) == [0.0] * 4


def test_boxed_answers():
    pytest.importorskip("math_verify")
    right = [(r"so \boxed{\frac{1}{2}}", r"\frac12"), (r"\boxed{0.5}", "1/2"), (r"\boxed{x^2+2x+1}", "(x+1)^2")]
    right += [(r"\boxed{1} no, \boxed{(1,3)}", r"\boxed{(1, 3)}")]
    wrong = [("1/2", "1/2"), (r"\boxed{1/3}", "1/2"), (r"\boxed{1/2", "1/2"), (r"\boxed{}", "2")]
    assert of(rewards.boxed_answer, right) == [1.0] * 4 and of(rewards.boxed_answer, wrong) == [0.0] * 4


def test_boxed_answers_say_what_they_need(monkeypatch):
    rewards._math_verify.cache_clear()
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match="pip install math-verify"):
        of(rewards.boxed_answer, [("a", "b")])


def test_formats_and_lengths():
    thinks = rewards.matches(r"<think>.*</think>\s*\S.*")
    assert thinks(["p"] * 3, ["<think>a\nb</think> 4", "4", "<think>a</think>"]) == [1.0, 0.0, 0.0]
    assert rewards.num_words(["p", "p"], ["a b  c", ""]) == [3.0, 0.0]
