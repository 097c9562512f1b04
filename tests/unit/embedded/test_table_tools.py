"""The embedded task with tools is what its documents claim, and the script that made it runs."""

import json
import random

import pytest

from rlhf_spmd.embedded import path_of
from rlhf_spmd.embedded.table_tools import OPERATIONS, Table
from rlhf_spmd.model.hf import load_tokenizer
from tools.embedded.make_tools import (
    CONTEXT,
    GUESSES,
    NUM_WORDS,
    RIGHT,
    WAYS,
    Recipe,
    answered,
    conversation,
    episodes,
    make,
    row,
    words,
)

ACTOR = path_of("tools/actor")


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in path_of(f"tools/{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_answers_are_right_and_held_out_words_are_in_no_prompt():
    prompts, held_out = rows("prompts"), rows("held_out")
    assert (len(prompts), len(held_out)) == (2048, 200)
    for one in (*prompts, *held_out):
        question, table = one["prompt"][0]["content"], one["table"]
        assert len(table) == NUM_WORDS and list(table) == sorted(table)  # the order says nothing
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


def test_only_one_way_uses_all_tools_and_is_right():
    draw = random.Random(0)
    known, held_out = words(Recipe())
    assert len(known) == 1600 and len(held_out) == 400 and sum(WAYS.values()) == pytest.approx(1.0)
    right = dict.fromkeys(WAYS, 0)
    for _ in range(200):
        one = row(draw, known)
        for way in WAYS:
            right[way] += conversation(draw, one, way)[-1]["content"] == one["answer"]
    assert right.pop(RIGHT) == 200 and max(right.values()) <= 20


def test_conversations_fit_and_keep_their_text():
    tokenizer, draw = load_tokenizer(str(ACTOR)), random.Random(1)
    for way in WAYS:
        one = row(draw, words(Recipe())[0])
        text = "".join(f"<|{part['role']}|>{part['content']}<|end|>" for part in conversation(draw, one, way))
        ids = tokenizer.encode(text, special=False)
        assert tokenizer.decode(ids, special=True) == text and len(ids) <= CONTEXT - 32
    assert answered({"table": {"amo": 12}}, "13<|end|>") == ""


def test_the_actor_is_often_wrong_and_needs_its_tools():
    made = json.loads(path_of("tools/made.json").read_text(encoding="utf-8"))
    some = rows("held_out")[:100]
    right = [sum(episodes(ACTOR, some, samples=2, temperature=1.0, tools=tools)) / 200 for tools in (True, False)]
    assert 0.2 <= right[0] <= 0.45 and right[1] <= 0.1 and 900_000 <= made["num_params"] <= 1_200_000
    assert 0.2 <= made["sampled"] <= 0.4 and made["sampled_without_tools"] <= 0.1 < made["ways"][GUESSES]


@pytest.mark.slow
def test_make_runs_from_end_to_end(tmp_path):
    made = make(tmp_path, Recipe(steps=20, batch=32, num_layers=1, num_prompts=32, num_held_out=16), ranks=2)
    assert (tmp_path / "actor" / "model.safetensors").is_file() and 0 <= made["greedy"] <= 1
