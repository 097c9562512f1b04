"""The embedded task with tools is what its documents claim."""

import json

import pytest

from rlhf_spmd.embedded import path_of
from rlhf_spmd.embedded.table_tools import OPERATIONS, Table


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in path_of(f"tools/{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_answers_are_right_and_held_out_words_are_in_no_prompt():
    prompts, held_out = rows("prompts"), rows("held_out")
    assert (len(prompts), len(held_out)) == (2048, 200)
    for one in (*prompts, *held_out):
        question, table = one["prompt"][0]["content"], one["table"]
        assert len(table) == 4 and list(table) == sorted(table)  # the order says nothing
        result = OPERATIONS[question[3]](table[question[:3]], table[question[4:]])
        assert one["answer"] == str(result)
    known, other = ({word for one in some for word in one["table"]} for some in (prompts, held_out))
    assert not known & other


def test_the_tools_answer():
    environment = Table()
    environment.reset({"amo": 12})
    assert environment.lookup("amo") == "12" and environment.lookup("tiv") == "unknown"
    assert [environment.calculate(one) for one in ("12*13", "5-7", "-2+3")] == ["156", "-2", "1"]
    with pytest.raises(ValueError, match="write two numbers"):
        environment.calculate("__import__('os')")
