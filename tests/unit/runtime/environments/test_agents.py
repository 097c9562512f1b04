"""Agents that ask the model themselves: their rows, what they are answered, and what they may not ask."""

import asyncio
import json
import os
import sys

import httpx
import httpx2
import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import tool_schema
from rlhf_spmd.runtime.environments.adapters import load_environments
from rlhf_spmd.runtime.environments.agents import Conversation, Refused, refused_option
from rlhf_spmd.runtime.environments.endpoint import UNKNOWN, Endpoint
from rlhf_spmd.runtime.environments.episode_states import Row
from rlhf_spmd.runtime.environments.native import Start
from tests.environments import agents
from tests.unit.runtime.environments.test_episodes import ASK, FILES, play, rows_of, scripted, text_of
from tests.unit.runtime.environments.test_episodes import folder as folder
from tests.unit.runtime.environments.test_episodes import world as world

DRAWING = {"max_new_tokens": 64, "temperature": 1.0, "top_p": 1.0, "stop": ["\n"]}
SCHEMAS = [tool_schema(function) for function in agents.FUNCTIONS.values()]
OTHERS = ("llama3", "mistral", "qwen3_kept")
SAID = {"words": "hm", "calls": [], "finish_reason": "stop", "num_prompt": 7, "num_drawn": 2}


@pytest.fixture
def drive(monkeypatch):
    """Returns drive(agent, *said): the steps of an episode; a number is the reward after a limit.

    package: what the agent's file imports.
    """
    for library in (httpx, httpx2):
        for kind in (library.Client, library.AsyncClient):
            monkeypatch.setattr(kind, "send", kind.send)
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "")

    def drive(agent: str, *said, is_cut=False, package=None, **columns) -> list:
        if package is None:
            monkeypatch.delitem(sys.modules, "openai", raising=False)

        async def episode() -> list:
            home = Endpoint(DRAWING)
            await home.open()
            assert os.environ["OPENAI_BASE_URL"] == home.base_url
            session = load_environments(f"{FILES}/agents.py:{agent}")[""].make()
            session.home = home
            row = session.row(0)
            found = [await row.begin(Start({"prompt": ASK, **columns}, "", None, 1, 2, "e"))]
            for one in said:
                found.append(await row.step(SAID | one))
            if not getattr(found[-1], "is_done", False):
                row.cut(SAID | {"finish_reason": "length"} if is_cut else None)
                found.append(await row.reward())
            await session.close()
            return found

        return asyncio.run(asyncio.wait_for(episode(), 60))

    return drive


@pytest.mark.parametrize("name", ["chatml", *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)])
def test_rows_are_those_of_the_environment_that_calls_the_same_tools(name, world):
    """Though the calls are written otherwise than the template would, and come back to it with ids."""
    first = {
        "llama3": '{"name": "add",  "parameters": {"b": 2, "a": 1}}',
        "mistral": '[TOOL_CALLS] [{"name": "add",  "arguments": {"b": 2, "a": 1}, "id": "abcdefghi"}]',
    }.get(name, ' so <tool_call>{"name":"add",  "arguments": {"b": 2, "a": 1}}</tool_call>')
    found = []
    for spec in ("functions.py:TOOLS", "agents.py:calls"):
        rows = rows_of(2, prompt=ASK, tools=SCHEMAS)
        episodes = world(spec, rows, name=name, num=1)
        ids, reasons, rewards = play(episodes, scripted(first, first, "3.0"))
        found.append(ids)
    assert reasons == ["tool_stopped"] * 2 and rewards == [[0.0, 0.0, 6.0]] * 2
    assert [episodes.counts()[key] for key in ("tool_calls", "agent_mismatches")] == [(4, 2), (0, 2)]
    after = [[text_of(episodes, row).rpartition("Go.")[2] for row in ids] for ids in found]
    assert after[0] == after[1] and after[0][0].count(first) == 2


@pytest.fixture(params=[None, "openai"])
def package(request):
    """Returns what an agent imports."""
    return request.param and pytest.importorskip(request.param)


def test_a_stream_tells_what_the_api_tells(drive, package):
    begun, step, end = drive("tells", {"words": "so", "finish_reason": "stop"}, {}, package=package)
    assert (begun.messages, begun.tools) == (ASK, None) and end.is_done and end.reward == 1.0
    (said,) = step.observation
    first, last, usage = json.loads(said["content"])
    assert first["choices"][0]["delta"]["content"] == "so" and first["object"] == "chat.completion.chunk"
    assert (last["choices"][0]["finish_reason"], usage["choices"], usage["usage"]["total_tokens"]) == ("stop", [], 9)


def test_other_processes_ask_at_the_endpoint(drive, monkeypatch):
    monkeypatch.setattr("rlhf_spmd.runtime.environments.endpoint.Client.refusal", UNKNOWN, raising=False)
    _, step, end = drive("over_http", {}, {})
    assert step.observation == [{"role": "user", "content": "200"}] and end.reward == 1.0


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ("twice", "sends a request while another one waits"),
        ("warm", "temperature=0.2, which would change the policy that is trained: leave it out, or give generation.t"),
        ("silent", "returned before it asked the model"),
    ],
)
def test_agents_that_cannot_be_trained_are_named(agent, says, drive):
    with pytest.raises(UserError, match=says):
        drive(agent, {}, {})


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"temperature": 1, "top_p": 1.0, "stop": "\n", "n": 1, "user": "u", "seed": None}, ""),
        ({"max_tokens": 64, "tool_choice": "auto", "parallel_tool_calls": True}, ""),
        ({"max_completion_tokens": 63}, "generation.max_new_tokens=64 is the limit"),
        ({"seed": 3}, "seed=3, which would change"),
        ({"n": 2}, "n=2, which"),
        ({"logprobs": True}, "logprobs=True"),
        ({"stop": ["a"]}, "generation.stop"),
    ],
)
def test_options_that_change_what_is_drawn_are_named(option, says):
    found = refused_option({"messages": [], "model": "m"} | option, DRAWING)
    assert says in found if says else not found


CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a":1, "b":2}'}}],
}
ANSWERED = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "3"}]}


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([*ASK, CALLED, ANSWERED], ""),
        ([*ASK, CALLED], "adds nothing"),
        ([*ASK, CALLED, CALLED], "adds a message of the role assistant"),
        ([CALLED, ANSWERED], "message 0 of the request"),
        ([*ASK, CALLED | {"content": "x"}, ANSWERED], "message 1 of the request"),
        ([*ASK, ANSWERED], "message 1 of the request"),
        ([*ASK, CALLED, ANSWERED | {"content": [{"type": "image_url"}]}], "or is not text"),
    ],
)
def test_requests_extend_the_conversation(messages, says):
    conversation = Conversation()
    assert conversation.added(ASK, None) == ASK
    conversation.messages.append(dict(CALLED, content="", tool_calls=[_read(CALLED)]))
    if says:
        with pytest.raises(Refused, match=says):
            conversation.added(messages, None)
        messages = [*ASK, CALLED, ANSWERED]  # which is still possible
    (new,) = conversation.added(messages, None)
    assert (new["name"], new["content"]) == ("add", "3")
    with pytest.raises(Refused, match="the tools of the request"):
        conversation.added([*messages, ANSWERED], SCHEMAS)


def _read(message):
    (call,) = message["tool_calls"]
    return call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}


def test_a_changed_conversation_is_an_error_of_the_agent(drive, package):
    *_, step = drive("forgets", {}, catches=True, package=package)
    assert (step.reward, step.is_done, step.num_changed) == (0.25, True, 1)
    error = Refused if package is None else package.BadRequestError
    with pytest.raises(error, match="message 1 of the request is not what the conversation"):
        drive("forgets", {}, catches=False, package=package)


@pytest.mark.parametrize(
    ("agent", "is_cut", "reward"), [("counts", True, 4), ("counts", False, 0), ("stubborn", True, 0)]
)
def test_a_limit_ends_the_agent(agent, is_cut, reward, drive, package):
    """The turn that it cut is given to the agent; then there is none. What an agent raises by then is worth nothing."""
    assert drive(agent, {}, is_cut=is_cut, package=package)[-1] == reward


def test_limits_and_failures_end_rows(world):
    """In real workers: a limit on turns, a limit in a turn, and an agent that raises."""
    rows = [Row(n, 0, n, {"prompt": ASK}, "Go.", ASK) for n in range(2)]
    episodes = world("agents.py:counts", rows, num=1, options={"max_turns": 2})
    said = {0: ["one", "two"], 1: ["three", None]}
    ids, reasons, rewards = play(episodes, lambda row, turn, _: said[row][turn])
    assert reasons == ["max_turns", "max_sampled_tokens"] and rewards == [[0.0, 0.0], [0.0]]
    rows = [Row(n, 0, n, {"prompt": ASK, "catches": bool(n)}, "Go.", ASK) for n in range(2)]
    episodes = world("agents.py:forgets", rows, num=1, options={"on_failure": "drop_group"})
    _, reasons, rewards = play(episodes, scripted("hm"))
    assert [episodes.is_dropped(row) for row in range(2)] == [True, False] and rewards[1] == [0.25]


@pytest.mark.parametrize(
    ("agent", "says"), [("blocking", "is not async"), ("lacks", "it asks for number, which is not a column")]
)
def test_bad_agents_are_named_before_anything_starts(agent, says):
    with pytest.raises(UserError, match=says):
        load_environments(f"{FILES}/agents.py:{agent}", ["prompt"])
