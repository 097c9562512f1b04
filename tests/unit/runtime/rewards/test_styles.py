"""How reward functions are bound: by the names of their parameters, for this program and for others."""

import asyncio
import functools

import pytest

from rlhf_spmd.runtime.rewards.function import RewardFunction
from rlhf_spmd.runtime.rewards.styles import Bound, Scored, bind

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


def bound(function, rows: Scored = ROWS) -> Bound:
    return bind(function, list(dict.fromkeys(name for row in rows.columns for name in row)))


def scores(function, rows: Scored = ROWS) -> list:
    return RewardFunction("mine:f", bound(function, rows)).score(rows)[0]


def seen(*names: str, rows: Scored = ROWS):
    """Returns what a function with these parameters gets, by name."""
    got: dict = {}
    space = {"got": got}
    exec(f"def f({', '.join(names)}):\n    got.update(locals())\n    return 1.0", space)
    bound(space["f"], rows).call(rows)
    return got | got.pop("kwargs", {})


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


@pytest.mark.parametrize(
    ("function", "receiver", "expected", "seen"),
    [
        (own, "responses", [1.0, 1.0, 0.0], [([[4], [1, 6], [9]], "default")]),
        (trl_async, "completions", [1.0, 2.0, 1.0], []),
        (verl_async, "solution_str", [1.0, 0.0, 0.0], []),
        (verl, "solution_str", [1.0, 1.0, 0.0], [("sums", {"index": index}) for index in range(3)]),
    ],
)
def test_a_style_is_told_by_the_parameter_that_receives_the_response(function, receiver, expected, seen):
    SEEN.clear()
    assert bound(function).receiver == receiver
    assert scores(function) == expected and seen == SEEN


def test_the_order_of_parameters_means_nothing():
    """A function of responses and a column got prompts as `responses`, and swapped ones each other."""
    assert scores(lambda responses, answer: [float(a == b) for a, b in zip(responses, answer, strict=True)]) == [
        1,
        0,
        0,
    ]
    assert scores(lambda answer, responses: list(map(len, responses))) == [1, 2, 1]
    assert scores(lambda responses, prompts: [len(one) - len(prompts[0]) for one in responses]) == [-3, -2, -3]
    assert scores(lambda responses: list(map(len, responses))) == [1, 2, 1]
    assert scores(lambda labels, prompts, queries: list(map(len, queries))) == [5, 6, 5]
    assert scores(lambda ground_truth, solution_str: float(solution_str == ground_truth)) == [1, 0, 0]


@pytest.mark.parametrize("receiver", ["responses", "completions", "queries"])
def test_every_style_has_the_tokens(receiver):
    for parameters in (
        (receiver, "completion_ids"),
        ("completion_ids=None", f"{receiver}=None"),
        (receiver, "**kwargs"),
    ):
        assert seen(*parameters)["completion_ids"] == ROWS.tokens
    assert scores(lambda solution_str, completion_ids: len(completion_ids)) == [1, 2, 1]
    assert scores(lambda solution_str, **columns: columns["completion_ids"][0]) == [4, 1, 9]


def test_a_function_of_everything_gets_every_word_and_every_column():
    columns = {"answer", "data_source", "extra_info", "reward_model"}
    words = {
        "responses": {"prompts"},
        "completions": {"prompts"},
        "queries": {"prompts", "labels"},
        "solution_str": {"ground_truth"},
    }
    for receiver, more in words.items():
        assert seen(receiver, "**kwargs").keys() == columns | more | {receiver, "completion_ids"}
    assert seen("**kwargs") == seen("prompts", "responses", "completion_ids", *columns)


def test_answers_of_verl_and_openrlhf_that_only_some_rows_have():
    truths = [{"reward_model": {"ground_truth": "a"}}, {"reward_model": {"style": "rule"}, "ground_truth": "b"}, {}]
    rows = Scored(["p"] * 3, ["a", "b", "c"], columns=truths)
    assert scores(lambda solution_str, ground_truth: float(solution_str == ground_truth), rows) == [1.0, 1.0, 0.0]
    rows = Scored(["p"] * 3, ["a", "b", "c"], columns=[{"labels": 1, "label": 2}, {"label": 3}, {}])
    assert seen("queries", "labels", rows=rows)["labels"] == [1, 3, None]


class Counter:
    def __call__(self, responses, answer):
        return [1.0] * len(responses)

    async def later(self, completions, **columns):
        return [float(len(columns["answer"][0]))] * len(completions)

    @staticmethod
    def still(responses):
        return [3.0] * len(responses)


class Late:
    async def __call__(self, solution_str):
        return float(len(solution_str))


def passes_on(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def scaled(prompts, responses, scale, answer, completion_ids=None):
    assert completion_ids in (None, "bound") or completion_ids == ROWS.tokens
    return [float(scale)] * len(responses)


def test_what_counts_as_a_function():
    assert (
        scores(Counter()) == [1.0] * 3 and scores(Counter().later) == [1.0] * 3 and scores(Counter.still) == [3.0] * 3
    )
    assert scores(Late()) == [1.0, 2.0, 1.0]
    assert scores(passes_on(own)) == [1.0, 1.0, 0.0] and scores(passes_on(verl_async)) == [1.0, 0.0, 0.0]
    assert scores(functools.cache(lambda solution_str, data_source=None: 1.0)) == [1.0] * 3
    for partial in (functools.partial(scaled, scale=2), functools.partial(scaled, "p", scale=2)):
        assert scores(partial) == [2.0] * 3
    kept = bound(functools.partial(scaled, scale=2, completion_ids="bound", prompts=None))
    assert kept.words == ("responses",) and kept.call(ROWS) == ([2.0] * 3, {})  # what is bound stays
    named = functools.update_wrapper(functools.partial(trl, answer=["4"] * 3), trl)  # as TRL wants partials
    assert scores(named) == [1.0, None, None]
    everything = functools.partial(lambda **given: [len(given)] * 3, answer="bound")
    assert scores(everything) == [7.0] * 3  # three words, four columns


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
    answered = [*CHAT, {"role": "assistant", "content": "an answer of the data set"}]
    mixed = [{"prompt": CHAT, "answer": "4"}, {"messages": answered, "answer": "4"}, {"answer": "4"}]
    assert scores(trl, Scored(["user: 2+2?", "user: 2+2?", "2+2?"], ["4"] * 3, [[4]] * 3, mixed)) == [1.0] * 3
    said = [{"role": "assistant", "content": "4"}]
    assert SEEN[-1][:2] == ([CHAT, CHAT, "2+2?"], [said, said, "4"])  # each row by itself


def test_the_prompt_is_what_the_model_has_read():
    """A conversation beside a text that is the prompt is only a column; a conversation under data.key is the prompt."""
    for columns, key, expected in (
        ({"prompt": "text", "messages": CHAT, "answer": "4"}, "prompt", "text"),
        ({"prompt": None, "messages": CHAT, "answer": "4"}, "prompt", CHAT),
        ({"dialog": CHAT, "answer": "4"}, "dialog", CHAT),
        ({"question": "text", "messages": CHAT, "answer": "4"}, "question", "text"),
    ):
        scores(trl, Scored(["text"], ["4"], [[4]], [columns], key=key))
        assert SEEN[-1][0] == [expected] and isinstance(SEEN[-1][1][0], list) == isinstance(expected, list)
