"""Rows with responses: their forms, which of their tokens are learned, limits, and what cannot be used."""

import json
from pathlib import Path

import numpy as np
import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.data.messages import conversation_of
from rlhf_spmd.runtime.data.packed_rows import NumberRows
from rlhf_spmd.runtime.data.prompts import PromptSet, load_prompts

BOS, EOS = 0, 1


class Characters:
    """One token per character, after a beginning of sequence; `$` is the end of sequence."""

    bos_token_id = BOS

    def encode(self, text, *, special=True):
        return [BOS] * special + [EOS if one == "$" else ord(one) for one in text]

    def decode(self, ids):
        return "".join("$" if one == EOS else chr(one) for one in ids if one != BOS)


def render(where, messages, *, answers=True):
    text = "".join(f"[{one['role'][0]}]{one['content']}$\n" for one in messages)
    return text + ("[a]" if answers else "")


def rewriting(where, messages, *, answers=True):
    """Returns a template that writes only the last message."""
    return render(where, messages[-1:], answers=answers)


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


ONE = {"columns": {"responses": "completion"}, "marks": "own"}
TWO = {"columns": {"better": "chosen", "worse": "rejected"}}


def load(tmp_path: Path, rows: list[dict], **options) -> PromptSet:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    limits = {"max_prompt_tokens": 99, "max_response_tokens": 99, "eos_ids": (EOS,), "render": render}
    return load_prompts(path, Characters(), **(limits | options))


def text_of(tokens: list[int]) -> str:
    return Characters().decode(tokens)


def one_row(tmp_path: Path, row: dict, **options) -> tuple[str, str, str]:
    """Returns prompt, response, and its learned tokens."""
    found = load(tmp_path, [row], **(ONE | options))
    response, marks = found.responses["responses"][0], found.numbers["own"][0]
    assert len(response) == len(marks)
    kept = [token for token, mark in zip(response, marks, strict=True) if mark]
    return text_of(found.prompts[0]), text_of(response), text_of(kept)


def refusal(tmp_path: Path, *rows: dict, **options) -> str:
    with pytest.raises(UserError) as error:
        load(tmp_path, list(rows), **options)
    return str(error.value)


# ---- one response ---------------------------------------------------------------------------------------------------


def test_prompt_and_completion(tmp_path):
    assert one_row(tmp_path, {"prompt": "2+2=", "completion": "4"}) == ("2+2=", "4$", "4$")
    assert one_row(tmp_path, {"prompt": "2+2=", "completion": "4$"})[1] == "4$"  # an end that is there
    found = load(tmp_path, [{"prompt": "ab", "completion": "c"}], **ONE)
    assert found.prompts == [[BOS, 97, 98]] and found.responses["responses"] == [[99, EOS]]


CONVERSATION = {"messages": [user("x"), said("one"), user("y"), said("two"), user("z")]}


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ("last", ("[u]x$\n[a]one$\n[u]y$\n[a]", "two$", "two$")),
        ("all", ("[u]x$\n[a]", "one$\n[u]y$\n[a]two$", "one$two$")),
    ],
)
def test_turns_of_a_conversation(tmp_path, turns, expected):
    """What follows the assistant's last turn is left out, and so is white space after an end of sequence."""
    assert one_row(tmp_path, CONVERSATION, turns=turns) == expected


def test_a_template_without_an_end_gets_one(tmp_path):
    def bare(where, messages, *, answers=True):
        return "".join(f"{one['role'][0]}:{one['content']} " for one in messages) + ("a:" if answers else "")

    assert one_row(tmp_path, {"messages": [user("x"), said("one")]}, render=bare)[1] == "one $"


def test_tokens_of_the_prompt_stay_as_they_are(tmp_path):
    """A tokenizer that would join the end of the prompt with the response encodes the response alone."""

    class Joining(Characters):
        def encode(self, text, *, special=True):
            return [7 if token == ord("#") else token for token in super().encode(text.replace("bc", "#"))]

    found = load_prompts(
        _written(tmp_path, {"prompt": "ab", "completion": "cd"}),
        Joining(),
        max_prompt_tokens=9,
        max_response_tokens=9,
        columns=ONE["columns"],
    )
    assert found.prompts == [[BOS, 97, 98]] and found.responses["responses"] == [[99, 100]]


def _written(tmp_path: Path, row: dict) -> Path:
    (tmp_path / "one.jsonl").write_text(json.dumps(row), encoding="utf-8")
    return tmp_path / "one.jsonl"


def test_conversations_without_an_answer_are_counted(tmp_path):
    rows = [{"messages": [user("x")]}, {"messages": [user("x"), said("y")]}]
    found = load(tmp_path, rows, **ONE)
    assert len(found) == 1 and found.counts["silent"] == 1
    text = refusal(tmp_path, rows[0], **ONE)
    assert "rows.jsonl has no row to learn from: " in text and "1 have no message of the assistant" in text


# ---- pairs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "q ", "chosen": "good", "rejected": "bad"}, ("q ", "good$", "bad$")),
        ({"chosen": "q good", "rejected": "q bad"}, ("q", " good$", " bad$")),
        (
            {"prompt": [user("q")], "chosen": [said("good")], "rejected": [said("bad")]},
            ("[u]q$\n[a]", "good$", "bad$"),
        ),
        ({"chosen": [user("q"), said("good")], "rejected": [user("q"), said("bad")]}, ("[u]q$\n[a]", "good$", "bad$")),
    ],
)
def test_pairs(tmp_path, row, expected):
    found = load(tmp_path, [row], **TWO)
    responses = (text_of(found.responses[key][0]) for key in ("better", "worse"))
    assert (text_of(found.prompts[0]), *responses) == expected


def test_numbers_of_rows(tmp_path):
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    rows = [pair | {"margin": 0.5}, pair, pair | {"margin": None}]
    found = load(tmp_path, rows, numbers={"margins": ("margin", 0.25)}, **TWO)
    assert found.numbers["margins"] == [[0.5], [0.25], [0.25]]
    assert found.padded("margins", np.array([1, 0]), ()).tolist() == [0.25, 0.5]
    for wrong, kind in (("0.5", "a string"), (True, "a boolean"), (float("nan"), "nan")):
        text = refusal(tmp_path, pair | {"margin": wrong}, numbers={"margins": ("margin", 0.0)}, **TWO)
        assert f"line 1: the value of 'margin' is {kind}, not a finite number" in text
    needed = {"numbers": {"margins": ("margin", None)}, **TWO}
    assert "no key 'margin'" in refusal(tmp_path, pair, **needed)
    assert "'margin' is null" in refusal(tmp_path, pair | {"margin": None}, **needed)


# ---- what data sets of others look like -----------------------------------------------------------------------------


def test_ultrafeedback_has_its_prompt_in_the_conversations(tmp_path):
    """As TRL reads it: the text is not read, and a heading counts rows where it says something else."""
    row = {"prompt": "q", "chosen": [user("q"), said("good")], "rejected": [user("q"), said("bad")]}
    row |= {"messages": row["chosen"], "score_chosen": 8.5}
    found = load(tmp_path, [row, row | {"prompt": None}, row | {"prompt": "Is it?"}], **TWO)
    assert [text_of(prompt) for prompt in found.prompts] == ["[u]q$\n[a]"] * 3
    assert text_of(found.responses["worse"][2]) == "bad$" and found.records([0])[0]["prompt"] == "q"
    assert found.remarks == (
        "1 whose 'prompt' is not in their conversations, which are read instead",
        "nothing reads the columns messages, score_chosen",
    )
    assert load(tmp_path, [row], **ONE).prompts == found.prompts[:1]


def test_a_prompt_as_text_before_answers_alone_is_the_message_of_the_user(tmp_path):
    row = {"prompt": "q", "chosen": [said("good")], "rejected": [said("bad")]}
    found = load(tmp_path, [row, row | {"prompt": [user("q")]}], **TWO)
    assert [text_of(prompt) for prompt in found.prompts] == ["[u]q$\n[a]"] * 2 and not found.remarks
    assert [text_of(found.responses["worse"][index]) for index in (0, 1)] == ["bad$"] * 2


@pytest.mark.parametrize("column", ["messages", "conversations", "conversation"])
def test_sharegpt_and_null_columns(tmp_path, column):
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "x"}, {"from": "gpt", "value": "one"}]
    row = {"prompt": None, "completion": None, "text": None, column: turns}
    assert one_row(tmp_path, row) == ("[s]s$\n[u]x$\n[a]", "one$", "one$")
    assert list(load(tmp_path, [row]).texts) == ["[s]s$\n[u]x$\n[a]"]
    assert turns[1] == {"from": "human", "value": "x"}


def test_parts_that_are_text_are_joined_and_null_keys_left_out(tmp_path):
    parts = [{"type": "text", "text": "x", "image": None}, {"type": "text", "text": "y"}]
    assert list(load(tmp_path, [{"prompt": [user(parts) | {"name": None}]}]).texts) == ["[u]xy$\n[a]"]


def test_what_a_row_gives_the_template(tmp_path):
    """Columns, or JSON text in them; a row's own arguments replace those of all rows; Parquet's nulls are left out."""
    import pyarrow
    from pyarrow import parquet

    seen = []

    def noted(where, messages, **given):
        seen.append(given)
        return render(where, messages)

    tool = {"type": "function", "function": {"name": "f", "parameters": None}}
    rows: list[dict] = [
        {"prompt": [user("x")], "tools": [tool], "chat_template_kwargs": {"a": 1}},
        {"prompt": [user("x")], "tools": json.dumps([tool]), "chat_template_kwargs": '{"a": 1, "b": null}'},
        {"prompt": [user("x")], "tools": None},
        {"prompt": "x", "tools": "a hammer"},
    ]
    found = load(tmp_path, rows, render=noted, template_kwargs={"a": 0, "c": 2})
    both = {"tools": [tool], "chat_template_kwargs": {"a": 1, "c": 2}}
    assert seen == [both, both, {"chat_template_kwargs": {"a": 0, "c": 2}}]
    assert found.records([0])[0]["tools"] == [tool]
    said_of_text = "1 of text, which no chat template renders, so that nothing reads tools and chat_template_kwargs"
    assert found.remarks == (said_of_text,)
    seen.clear()
    rows = [rows[0], {"prompt": [user("x")], "chat_template_kwargs": {"b": 1}}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    load_prompts(tmp_path / "p.parquet", Characters(), max_prompt_tokens=99, render=noted)
    assert [given["chat_template_kwargs"] for given in seen] == [{"a": 1}, {"b": 1}]
    assert seen[0]["tools"] == [{"type": "function", "function": {"name": "f"}}] and "tools" not in seen[1]


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("tools", {"name": "f"}, "'tools' is an object, not a list of objects"),
        ("tools", "f(x)", "'tools' is text that is not JSON"),
        ("chat_template_kwargs", [1], "'chat_template_kwargs' is a list, not an object"),
        ("chat_template_kwargs", {"tools": []}, "has 'tools', .*: give it as the column 'tools' of a row"),
        ("chat_template_kwargs", {"strftime_now": 1}, "has 'strftime_now', which every chat template is given by"),
    ],
)
def test_arguments_that_cannot_be_given(tmp_path, column, value, expected):
    with pytest.raises(AssertionError, match=f"line 1: .*{expected}"):
        raise AssertionError(refusal(tmp_path, {"prompt": [user("x")], column: value}))


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_long_responses(tmp_path):
    rows = [{"prompt": "q", "completion": "abcdef"}, {"prompt": "q", "completion": "ab"}]
    assert "line 1: the response has 7 tokens, the limit is 4" in refusal(tmp_path, *rows, max_response_tokens=4, **ONE)
    found = load(tmp_path, rows, max_response_tokens=4, long_prompts="truncate", **ONE)
    assert [text_of(row) for row in found.responses["responses"]] == ["abcd", "ab$"]
    assert found.numbers["own"] == [[1.0] * 4, [1.0] * 3]
    assert (found.counts["cut"], found.counts["truncated"], found.counts["dropped"]) == (1, 0, 0)
    found = load(tmp_path, rows, max_response_tokens=4, long_prompts="drop", **ONE)
    assert len(found) == 1 and (found.counts["cut"], found.counts["dropped"]) == (0, 1)
    text = refusal(tmp_path, rows[0], max_response_tokens=4, long_prompts="drop", **ONE)
    assert "1 are too long (raise data.max_prompt or generation.max_new_tokens)" in text


def test_pairs_that_are_equal_once_they_are_cut_are_dropped(tmp_path):
    rows = [{"prompt": "q", "chosen": "aaax", "rejected": "aaay"}, {"prompt": "q", "chosen": "a", "rejected": "b"}]
    found = load(tmp_path, rows, max_response_tokens=3, long_prompts="truncate", **TWO)
    assert len(found) == 1 and (found.counts["cut"], found.counts["dropped"]) == (0, 1)


# ---- what cannot be used --------------------------------------------------------------------------------------------

PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
WRONG = {
    "equal": (TWO, [PAIR | {"rejected": "a"}], "line 1: 'chosen' and 'rejected' are equal, .* remove the row"),
    "empty completion": (
        ONE,
        [{"prompt": "q", "completion": " "}],
        "line 1: the value of 'completion' is empty: write",
    ),
    "two forms in a row": (
        TWO,
        [PAIR | {"prompt": [user("q")]}],
        "'prompt', 'chosen', 'rejected' are strings and lists of messages: write all as strings, or all as lists",
    ),
    "two forms in a set": (
        ONE,
        [{"text": "a"}, {"prompt": "q", "completion": "a"}],
        "line 2: the row has a prompt and responses, and that of .*line 1 has the column 'text': write all in one way",
    ),
    "no completion": (
        ONE,
        [{"prompt": "q"}],
        r"line 1: no key 'completion' \(keys there: 'prompt'\): add it, or write the row as 'messages' or 'text'",
    ),
    "no prompt": (
        ONE,
        [{"prompt": None, "completion": "a"}],
        r"line 1: the value of 'prompt' is null: give it a value",
    ),
    "no rejected": (TWO, [{"prompt": "q", "chosen": "a"}], "line 1: no key 'rejected'"),
    "an image": (
        ONE,
        [{"messages": [user([{"type": "image", "url": "x"}]), said("b")]}],
        "line 1: message 1 of 'messages' has a part that is not .*: the models here read text only",
    ),
    "no role": (ONE, [{"messages": [{"content": "a"}, said("b")]}], "line 1: message 1 of 'messages' has no 'role'"),
    "half a character in a conversation": (
        ONE,
        [{"messages": [user("a\ud83d"), said("b")]}],
        "line 1: the conversation has half a surrogate pair",
    ),
    "no message in common": (
        TWO,
        [{"chosen": [user("a"), said("b")], "rejected": [user("c"), said("b")]}],
        "line 1: the conversations have no message in common: write the column 'prompt'",
    ),
    "no answer in a pair": (
        TWO,
        [{"chosen": [user("a"), said("b")], "rejected": [user("a"), user("b")]}],
        "line 1: 'rejected' has no message of the assistant, .*: add its answer, or remove the row",
    ),
    "an answer alone": (
        ONE,
        [{"messages": [said("b")]}],
        "line 1: the conversation has no message before the assistant's: add the question",
    ),
    "a template that rewrites": (
        ONE | {"render": rewriting, "turns": "all"},
        [CONVERSATION],
        "line 1: the chat template does not only add .*set data.turns=last, or give data.chat_template=FILE",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_used_is_named_with_its_line(name, tmp_path):
    options, rows, expected = WRONG[name]
    text = refusal(tmp_path, *rows, **options)
    assert "\n" not in text and "rows.jsonl" in text
    with pytest.raises(AssertionError, match=expected):
        raise AssertionError(text)


def test_marks_count_in_the_fingerprint(tmp_path):
    found, same, other = (load(tmp_path, [CONVERSATION], turns="all", **ONE) for _ in range(3))
    marks = found.numbers["own"]
    object.__setattr__(other, "numbers", {"own": NumberRows(1 - marks.items, marks.ends)})
    assert same.fingerprint() == found.fingerprint() != other.fingerprint()


def test_answers_that_are_marked_0_are_not_learned(tmp_path):
    wrong, right = said("bad") | {"weight": 0}, said("good") | {"loss": True}
    both = {"messages": [user("a"), wrong, user("b"), right, user("c"), said("no") | {"train": False}]}
    assert one_row(tmp_path, both, turns="all") == ("[u]a$\n[a]bad$\n[u]b$\n[a]", "good$", "good$")
    between = {"messages": [user("a"), right, user("b"), wrong, user("c"), right]}
    assert one_row(tmp_path, between, turns="all")[2] == "good$good$"
    apart = {"prompt": [user("a")], "completion": [wrong, user("b"), right]}
    assert one_row(tmp_path, apart)[2] == "good$"
    found = load(tmp_path, [both, {"messages": [user("a"), wrong]}, between], **ONE)
    assert found.counts["silent"] == 2 and len(found) == 1
    assert "is marked 0" in refusal(tmp_path, {"chosen": [user("a"), right], "rejected": [user("a"), wrong]}, **TWO)
    for value in (0.5, "0", 2):
        message = refusal(tmp_path, {"messages": [user("a"), said("b") | {"weight": value}]}, **ONE)
        assert f"line 1: {value!r} is not a 'weight' of a message: write 1 if it is learned, 0 if not" in message


@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_a_system_column_is_the_first_message(name, tmp_path):
    row, system = {name: "Be brief."}, {"role": "system", "content": "Be brief."}
    ask, start = [user("a")], "[s]Be brief.$\n[u]a$\n[a]"
    in_parts = {name: [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}
    for one in (row, in_parts):
        assert one_row(tmp_path, one | {"messages": [*ask, said("b")]})[:2] == (start, "b$")
    assert f"line 1: {name!r} has a number as 'content'" in refusal(tmp_path, {name: 3, "messages": [*ask, said("b")]})
    assert one_row(tmp_path, row | {"messages": [system, *ask, said("b")]})[:2] == (start, "b$")
    assert one_row(tmp_path, row | {"prompt": ask, "completion": [said("b")]})[:2] == (start, "b$")
    pairs = [
        {"prompt": ask, "chosen": [said("b")], "rejected": [said("c")]},
        {"chosen": [*ask, said("b")], "rejected": [*ask, said("c")]},
        {"prompt": "a", "chosen": [said("b")], "rejected": [said("c")]},
    ]
    for pair in pairs:
        found = load(tmp_path, [row | pair], **TWO)
        assert text_of(found.prompts[0]) == start and text_of(found.responses["better"][0]) == "b$"
    found = load(tmp_path, [row | {"prompt": ask}, {name: "", "prompt": ask}, row | {"prompt": "a"}])
    assert list(found.texts) == [start, "[u]a$\n[a]", "a"] and found.records([0]) == [row | {"prompt": ask}]
    assert found.remarks == (f"1 of text, which no chat template renders, so that nothing reads {name}",)
    assert conversation_of(row | {"prompt": ask}, "prompt") == [system, *ask]
    other = [{"role": "system", "content": "No."}, *ask]
    assert f"line 1: {name!r} is not what" in refusal(tmp_path, row | {"messages": [*other, said("b")]}, **ONE)
