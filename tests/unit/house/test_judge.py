"""The reward function of docs/judge.md, as it stands there, against a server that speaks the chat protocol."""

import asyncio

from tests.unit.house.served import served
from tests.unit.house.test_documents import ROOT, blocks


def reply(path: str, body: dict) -> dict:
    """Replies to an answer with its own text."""
    assert (path, body["model"]) == ("/v1/chat/completions", "judge")
    text = body["messages"][0]["content"].partition("Answer: ")[2]
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_a_reply_becomes_a_score():
    (block,) = [text for language, text in blocks(ROOT / "docs" / "judge.md") if language == "python"]
    names, replies = {}, ["7", "I say 10", "11", "none"]
    exec(block, names)
    with served(reply) as (address, _):
        names["SERVER"] = f"{address}/v1"
        assert asyncio.run(names["score"](["Why?"] * len(replies), replies)) == [0.7, 1.0, 1.0, 0.0]
