"""An agent of the user in one episode: an async function run(client, **columns) -> reward, which asks the model with a
client of OpenAI's form.

Each request is a turn. The first one opens the row. Each later one must extend the conversation: its messages are
compared with those of the requests before and with the answers that were given out, and only what is new is appended
to the row, so what the model drew stays as it is. A request that says something else is answered with an error, as a
service does; one that would change how the model draws ends the run. A copy of a request that waits, which a client
sends when its connection broke, gets the same answer.
"""

import asyncio
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.texts.turns import tool_call
from rlhf_spmd.runtime.environments.native import (
    ANSWER_ROLES,
    Message,
    Opening,
    Session,
    Start,
    Step,
    checking,
    number,
    taken_by,
)

CLIENT = "client"  # the parameter by which a function is known as an agent
OVER = "context_length_exceeded", "a limit has ended this episode"
CHANGED = "context_changed"
MOST_REFUSED = 100  # requests of an episode: an agent may try again without an end
VARIABLES = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": "none"}
READ = {"messages", "tools", "model", "stream", "stream_options"}  # parts of a request
IGNORED = {"user", "metadata", "store", "service_tier", "timeout", "prompt_cache_key", "safety_identifier"}
# what may be said, because it changes nothing
NEUTRAL: dict[str, Any] = {
    "n": 1,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "logprobs": False,
    "logit_bias": {},
    "response_format": {"type": "text"},
}
LENGTHS = ("max_tokens", "max_completion_tokens")


class Refused(Exception):
    """A request that gets an error for its answer."""

    status_code = 400

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code, self.message = code, message


@dataclass(slots=True)
class Conversation:
    """What has been said in an episode, as chat templates take it."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None

    def added(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> list[Message]:
        """Appends the messages of a request that are new, and returns them. Raises Refused if the request does not
        extend the conversation."""
        asked, num = list(map(plain, messages)), len(self.messages)
        calls = [call for message in asked for call in message.get("tool_calls", ())]
        names = {call["id"]: call["function"]["name"] for call in calls}
        for message in asked:
            if message["role"] == "tool":
                message["name"] = names.get(message["tool_call_id"], "unknown")
        if num:
            pairs = enumerate(zip(self.messages, asked, strict=False))
            differs = next((index for index, (before, now) in pairs if before != now), min(num, len(asked)))
            if differs < num:
                raise Refused(
                    CHANGED,
                    f"message {differs} of the request is not what the conversation of this episode has there "
                    f"({_shown(self.messages[differs])}): an episode is one conversation, to which requests only add",
                )
            if tools != self.tools:
                raise Refused(CHANGED, "the tools of the request are not those of the first request of this episode")
            others = [message["role"] for message in asked[num:] if message["role"] not in ANSWER_ROLES]
            if others or len(asked) == num:
                said = f"a message of the role {others[0]}" if others else "nothing"
                raise Refused(CHANGED, f"the request adds {said}: add messages of tools or of the user")
        self.tools, self.messages = tools, asked
        return asked[num:]


def plain(message: Mapping[str, Any]) -> Message:
    """Returns a message as chat templates take it, without what says nothing. Raises Refused for parts other than
    text."""
    try:
        role, content = message["role"], message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content)
        kept: Message = {"role": {"developer": "system"}.get(role, role), "content": content}
        if role == "assistant":
            kept["content"] = content.strip()
            calls = [(call["function"], call["id"]) for call in message.get("tool_calls") or ()]
            said = [tool_call(call["name"], json.loads(call["arguments"] or "{}"), name) for call, name in calls]
            kept |= {"tool_calls": said} if said else {}
        if role == "tool":
            kept["tool_call_id"] = message["tool_call_id"]
        return kept
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Refused("invalid_messages", f"this message cannot be read, or is not text: {_shown(message)}") from None


def _shown(message: Mapping[str, Any]) -> str:
    return json.dumps(message, ensure_ascii=False, default=str)[:120]


def refused_option(body: Mapping[str, Any], drawing: Mapping[str, Any]) -> str:
    """Returns why a request would change how the model draws; empty: it would not.

    drawing: the options of the run's generation, by name.
    """
    for name, value in body.items():
        if name in READ or name in IGNORED or value is None:
            continue
        if name in LENGTHS:
            if value >= drawing["max_new_tokens"]:
                continue
            return f"{name}={value}: generation.max_new_tokens={drawing['max_new_tokens']} is the limit; leave it out"
        if name in drawing:
            now = drawing[name]
            if value == now or (name == "stop" and [value] == now):
                continue
            return (
                f"{name}={value!r}, which would change the policy that is trained: leave it out, or give "
                f"generation.{name} (now {now})"
            )
        if name not in NEUTRAL or value != NEUTRAL[name]:
            return f"{name}={value!r}, which would change what the model samples, or is not offered: leave it out"
    return ""


@dataclass(slots=True)
class Request:
    """A request that waits for the model. added: its new messages."""

    body: dict[str, Any]
    added: list[Message]
    answer: asyncio.Future[dict[str, Any]]


class AgentSession(Session):
    """An agent, which runs as a task of its own between its requests.

    home: its endpoint.Endpoint, which gives it a client.
    """

    home: Any

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.conversation = Conversation()
        self.waiting: Request | None = None
        self.events: asyncio.Queue[Request | float | BaseException] = asyncio.Queue()
        self.num_refused = self.num_changed = self.turn = 0
        self.limit_answer: Any = None  # what a turn said that a limit cut
        self.is_over = self.has_ended = False

    # ---- the rank's side --------------------------------------------------------------------------------------------

    async def begin(self, start: Start) -> Opening:
        self.name = start.episode_id
        client = self.home.enter(self)
        self.task = asyncio.create_task(self._run(client, start))
        event = await self._next()
        if not isinstance(event, Request):
            raise UserError("the agent returned before it asked the model: let it send a request in each episode")
        return Opening(messages=event.added, tools=self.conversation.tools)

    async def step(self, text: Any) -> Step:
        """Gives the answer of the model to the request that waits, and returns the next request."""
        self._give(text)
        before = self.num_changed
        event = await self._next()
        changed = self.num_changed - before
        if isinstance(event, Request):
            return Step(event.added, num_changed=changed)
        self.has_ended = True
        return Step(reward=event, is_done=True, num_changed=changed)

    def cut(self, text: Any) -> None:
        self.limit_answer = text

    async def reward(self) -> float:
        """Ends an agent whose episode a limit has ended. What it raises then is worth nothing."""
        if self.has_ended:
            return 0.0
        self.is_over = True
        if self.limit_answer is not None:
            self._give(self.limit_answer)
        elif self.waiting is not None:
            self.waiting.answer.set_exception(Refused(*OVER))
        try:
            event = await self._next()
            assert not isinstance(event, Request), "requests are refused by now"
            return event
        except UserError:
            raise
        except Exception:
            return 0.0

    async def close(self) -> None:
        self.is_over = True
        self.home.leave(self)
        self.task.cancel()
        if self.waiting is not None and not self.waiting.answer.done():
            self.waiting.answer.cancel()

    async def _next(self) -> Request | float:
        """Waits for what the agent does next. Raises what it raises."""
        event = await self.events.get()
        if isinstance(event, BaseException):
            raise event
        return event

    def _give(self, said: Mapping[str, Any]) -> None:
        """Answers the request that waits."""
        assert self.waiting is not None, "a request waits for each turn"
        request, self.waiting = self.waiting, None
        answer = completion(said, request.body, f"{self.name}-{self.turn}")
        self.turn += 1
        self.conversation.messages.append(plain(answer["choices"][0]["message"]))
        if not request.answer.done():
            request.answer.set_result(answer)

    # ---- the agent's side -------------------------------------------------------------------------------------------

    async def _run(self, client: Any, start: Start) -> None:
        values = {name: value for name, value in taken_by(self.function, start.values).items() if name != CLIENT}
        try:
            result = await self.function(client, **values)
            with checking("the agent", result, "the reward, a number"):
                self.events.put_nowait(number(result))
        except BaseException as error:
            self.events.put_nowait(error)

    async def create(self, body: dict[str, Any], *, is_again: bool = False) -> dict[str, Any]:
        """Answers a request with a completion. Raises Refused. is_again: its client says that it has sent it before."""
        try:
            if self.is_over:
                raise Refused(*OVER)
            if not is_again or self.waiting is None or self.waiting.body != body:
                self._take(body)
        except Refused as error:
            self.num_refused += 1
            self.num_changed += error.code == CHANGED
            if self.num_refused > MOST_REFUSED:
                self.events.put_nowait(UserError(f"the agent goes on after {MOST_REFUSED} errors such as: {error}"))
            raise
        assert self.waiting is not None
        return await asyncio.shield(self.waiting.answer)

    def _take(self, body: dict[str, Any]) -> None:
        """Takes a new request. Raises Refused."""
        wrong = refused_option(body, self.home.drawing)
        wrong = f"a request of the agent has {wrong}" if wrong else wrong
        if self.waiting is not None:
            wrong = "the agent sends a request while another one waits: let it send one after the other"
        if wrong:
            self.events.put_nowait(UserError(wrong))
            raise Refused("invalid_request", wrong)
        added = self.conversation.added(body.get("messages") or [], body.get("tools") or None)
        self.waiting = Request(body, added, asyncio.get_running_loop().create_future())
        self.events.put_nowait(self.waiting)


@contextmanager
def no_endpoint() -> Iterator[None]:
    """Sets the variables without which OpenAI's client cannot be made, while a file is imported where nobody asks."""
    missing = VARIABLES.keys() - os.environ.keys()
    os.environ.update({name: VARIABLES[name] for name in missing})
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def is_agent(function: Any) -> bool:
    """Returns whether something is a function that takes a client first."""
    return inspect.isfunction(function) and [*inspect.signature(function).parameters][:1] == [CLIENT]


# ---- what comes back ------------------------------------------------------------------------------------------------


def completion(said: Mapping[str, Any], body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the answer to a request, the same in a resumed run.

    said: by the model: words, calls (id, name, arguments), finish_reason, and num_prompt and num_drawn tokens.
    """
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)},
        }
        for call in said["calls"]
    ]
    words = said["words"] or (None if calls else "")
    message = {"role": "assistant", "content": words, "refusal": None, "tool_calls": calls or None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": said["finish_reason"]}
    num_prompt, num_drawn = said["num_prompt"], said["num_drawn"]
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_drawn, "total_tokens": num_prompt + num_drawn}
    about = {
        "id": f"chatcmpl-{name}",
        "object": "chat.completion",
        "created": 0,
        "model": body.get("model") or "policy",
    }
    return about | {"choices": [choice], "usage": usage}


def chunks(answer: Mapping[str, Any], body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a completion in the pieces of a stream."""
    (choice,) = answer["choices"]
    about = {**answer, "object": "chat.completion.chunk", "usage": None}
    delta = choice["message"] | {}
    if calls := delta.pop("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    pieces = [
        about | {"choices": [{"index": 0, "delta": part, "logprobs": None, "finish_reason": reason}]}
        for part, reason in ((delta, None), ({}, choice["finish_reason"]))
    ]
    if (body.get("stream_options") or {}).get("include_usage"):
        pieces.append(about | {"choices": [], "usage": answer["usage"]})
    return pieces
