"""The client of reward servers, against servers of this process that score a query by its length."""

import asyncio

import pytest

from rlhf_spmd import rewards
from rlhf_spmd.errors import UserError
from tests.unit.house.served import served


def reply(path: str, body: dict) -> dict:
    return {"rewards": [float(len(text)) for text in body["query"]]}


def ask(function, queries, **columns):
    return asyncio.run(function(queries, ["p"] * len(queries), [None] * len(queries), **columns))


def test_batches_keep_the_order_and_servers_take_turns():
    with served(reply) as (one, first), served(reply) as (other, second):
        function = rewards.remote(one, other, batch=2, columns=["answer"])
        queries = ["a" * length for length in (3, 1, 4, 1, 5)]
        assert ask(function, queries, answer=["x"] * 5, other=["y"] * 5) == [3.0, 1.0, 4.0, 1.0, 5.0]
    assert sorted(len(body["query"]) for body in first + second) == [1, 2, 2]
    assert first and second and {*first[0]} == {"query", "prompts", "labels", "answer"}


def test_a_server_that_fails_or_is_not_there_is_left_for_the_next_one(monkeypatch):
    pauses = []

    async def at_once(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(rewards.asyncio, "sleep", at_once)
    with served(reply, *[503] * 9) as (bad, asked), served(reply) as (good, _):
        assert ask(rewards.remote(bad, good), ["abc"]) == [3.0]
    assert len(asked) == 1 and pauses == [1.0]
    with pytest.raises(UserError, match=r"after 3 tries, is: http://127.0.0.1:\d+"):
        ask(rewards.remote(good, tries=3), ["abc"])
    assert pauses == [1.0, 1.0, 2.0]
