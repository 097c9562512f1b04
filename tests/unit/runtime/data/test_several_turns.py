"""Conversations with tools as data: their tokens are those of the chat template, and what is learned of them is what
the model would have drawn in an episode."""

import json
import random

import pytest

from rlhf_spmd.model.hf import ChatTemplate, load_tokenizer
from rlhf_spmd.runtime.data.prompts import load_prompts
from tests.templates import ALL_SPECIAL, ENDS, HERE, STARTED, joins_of, write_bytes_tokenizer
from tests.unit.model.texts.test_turns import TOOLS, WITH_TOOLS, conversation, said_by

LEARN = {"columns": {"responses": "completion"}, "marks": "own", "turns": "all"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bytes_tokenizer(tmp_path_factory.mktemp("tokenizer"), special=ALL_SPECIAL)


def load(folder, tmp_path, name: str, rows: list[dict], **options):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    template, tokenizer = ChatTemplate(folder, str(HERE / f"{name}.jinja"), started=STARTED), load_tokenizer(folder)
    limits = {"max_prompt_tokens": 9999, "max_response_tokens": 9999, "eos_ids": (tokenizer.vocabulary()[ENDS[name]],)}
    return load_prompts(path, tokenizer, render=template.render, **limits, **(LEARN | options))


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_what_is_learned_is_what_an_episode_draws(name, folder, tmp_path):
    joins, tokenizer = joins_of(folder, name, TOOLS)
    draw, rows, episodes = random.Random(3), [], []
    for _ in range(20):
        first = [{"role": "user", "content": said_by(draw)}]
        after = [*conversation(draw, name, True), {"role": "assistant", "content": said_by(draw)}]
        prompt = joins.encode(joins.render(first, True))
        ids: list[int] = []
        drawn: list[float] = []
        for place in range(0, len(after), 2):  # as an episode would have gone
            opened = joins.render([*first, *after[:place]], True)
            closed = joins.render([*first, *after[: place + 1]], False)
            said = joins.encode(closed[len(opened) :].removesuffix(joins.end)) + joins.encode(ENDS[name])
            back = after[place + 1 : place + 2]
            answer = joins.after(said, back, after[place].get("tool_calls", [])) if back else []
            ids, drawn = [*ids, *said, *answer], [*drawn, *[1.0] * len(said), *[0.0] * len(answer)]
        rows.append({"messages": [*first, *after], "tools": TOOLS})
        episodes.append((prompt, ids, drawn, joins.encode(joins.render([*first, *after], False))))
    found = load(folder, tmp_path, name, rows)
    for number, (prompt, ids, drawn, whole) in enumerate(episodes):
        tokens = found.responses["responses"].row(number).tolist()
        assert found.prompts.row(number).tolist() == prompt and tokens == ids, number
        assert found.padded("own", [number], (len(ids),))[0].tolist() == drawn
        whole += joins.encode(ENDS[name])  # which OLMo 3 does not write after all turns
        assert whole[: len(prompt) + len(tokens)] == prompt + tokens  # the template writes nothing else
        assert not tokenizer.decode(whole[len(prompt) + len(tokens) :]).strip()
    only_last = load(folder, tmp_path, name, rows[:1], turns="last")
    assert len(only_last.responses["responses"].row(0)) < len(episodes[0][1])


def test_an_end_that_begins_the_next_message_is_learned(folder, tmp_path):
    """As the model draws it: <|user|> by GLM-4, whose template writes nothing after a turn."""
    said = [{"role": role, "content": word} for word, role in zip("abcd", ("user", "assistant") * 2, strict=True)]
    found, tokenizer = load(folder, tmp_path, "glm4", [{"messages": said}]), load_tokenizer(folder)
    tokens = found.responses["responses"].row(0).tolist()
    learned = found.padded("own", [0], (len(tokens),))[0].tolist()
    assert tokenizer.decode(tokens, special=True) == "\nb<|user|>\nc<|assistant|>\nd<|user|>"
    assert learned == [1, 1, 1, 0, 0, 0, 1, 1, 1]
