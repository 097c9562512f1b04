"""An agent of the user in one episode: an async function run(client, **columns) -> reward, which asks the model with a
client of OpenAI's form.

Each request is a turn. The first one opens the row. Each later one must extend the conversation: its messages are
compared with those of the requests before and with the answers that were given out, and only what is new is appended
to the row, so what the model drew stays as it is. A request that says something else opens a further row if the episode
has one, as does one that is sent while others wait; else it is answered with an error, as a service does. One that
would change how the model draws ends the run. A copy of a request that waits, which a client sends when its connection
broke, gets the same answer.

A row has a key that does not depend on when its first request came: a hash of its messages and tools, and how many
rows these have opened before.
"""

import asyncio
import hashlib
import inspect
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
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
    """What has been said in a row, as chat templates take it. roles: of messages that may be added."""

    roles: Sequence[str] = ANSWER_ROLES
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
            others = [message["role"] for message in asked[num:] if message["role"] not in self.roles]
            if others or len(asked) == num:
                said = f"a message of the role {others[0]}" if others else "nothing"
                raise Refused(CHANGED, f"the request adds {said}: add messages of tools or of the user")
        self.tools, self.messages = tools, asked
        return asked[num:]

    def is_extended_by(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> bool:
        """Returns whether a request extends the conversation. Raises Refused for messages that cannot be read."""
        try:
            replace(self).added(messages, tools)
        except Refused as error:
            if error.code != CHANGED:
                raise
            return False
        return True


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


class AgentRow(Session):
    """A row of an agent's episode, as its rank asks for it. key: of the row; empty: it has not been opened."""

    def __init__(self, episode: "AgentSession"):
        self.episode = episode
        self.conversation, self.key = Conversation(episode.home.extends), ""
        self.waiting: Request | None = None
        self.events: asyncio.Queue[Request | float | BaseException] = asyncio.Queue()
        self.turn = 0
        self.limit_answer: Any = None  # what a turn said that a limit cut
        self.has_begun = self.is_over = self.has_ended = False

    async def begin(self, start: Start) -> Opening:
        self.has_begun = True
        self.episode.start(start)
        event = await self._next()
        if isinstance(event, Request):
            return Opening(messages=event.added, tools=self.conversation.tools, key=self.key)
        if self is self.episode.rows[0]:
            raise UserError("the agent returned before it asked the model: let it send a request in each episode")
        return Opening()

    async def step(self, text: Any) -> Step:
        """Gives the answer of the model to the request that waits, and returns the next request."""
        self._give(text)
        event = await self._next()
        if isinstance(event, Request):
            return Step(event.added, num_changed=self.episode.changed() if self.is_alone else 0)
        self.has_ended = True
        return Step(reward=event, is_done=True, num_changed=self.episode.changed())

    def cut(self, text: Any) -> None:
        self.limit_answer = text

    async def reward(self) -> float:
        """Ends a row that a limit has ended. What its agent raises then is worth nothing."""
        if self.has_ended:
            return 0.0
        self.is_over = True
        if self.limit_answer is not None:
            self._give(self.limit_answer)
        elif self.waiting is not None:
            request, self.waiting = self.waiting, None
            if self.turn:  # it extends the row, and does so again if it is repeated
                del self.conversation.messages[-len(request.added) :]
            request.answer.set_exception(Refused(*OVER))
        try:
            event = await self._next()
            assert not isinstance(event, Request), "requests are refused by now"
            return event
        except UserError:
            raise
        except Exception:
            return 0.0

    @property
    def is_alone(self) -> bool:
        """Whether its episode has no other row."""
        return len(self.episode.rows) == 1

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
        name = f"{self.episode.name}-{self.turn}" if self.is_alone else f"{self.episode.name}-{self.key}-{self.turn}"
        answer = completion(said, request.body, name)
        self.turn += 1
        self.conversation.messages.append(plain(answer["choices"][0]["message"]))
        if not request.answer.done():
            request.answer.set_result(answer)

    def take(self, body: dict[str, Any]) -> Request:
        """Takes a request that extends the row, or opens it. Raises Refused."""
        added = self.conversation.added(body.get("messages") or [], body.get("tools") or None)
        self.waiting = Request(body, added, asyncio.get_running_loop().create_future())
        self.events.put_nowait(self.waiting)
        return self.waiting


class AgentSession(Session):
    """An agent, which runs as a task of its own between its requests.

    home: its endpoint.Endpoint, which gives it a client and a key.
    opened: the numbers of rows that an earlier object of this episode has opened, by their keys.
    """

    home: Any
    endpoint_key: str = ""
    opened: Mapping[str, int] = MappingProxyType({})

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.rows: list[AgentRow] = []
        self.task: asyncio.Task[None] | None = None
        self.num_refused = self.num_changed = 0
        self.is_closed = False
        self.num_opened: Counter[str] = Counter()  # rows by the hash of what opened them

    # ---- the rank's side --------------------------------------------------------------------------------------------

    def row(self, index: int) -> AgentRow:
        self.rows = self.rows or [AgentRow(self) for _ in range(self.home.num_rows)]
        return self.rows[index]

    def start(self, start: Start) -> None:
        """Starts the agent, once."""
        if self.task is None:
            self.name = start.episode_id
            client = self.home.enter(self)
            self.task = asyncio.create_task(self._run(client, start))

    def changed(self) -> int:
        """Returns how many requests have been refused since the last call because they changed the conversation."""
        num, self.num_changed = self.num_changed, 0
        return num

    async def close(self) -> None:
        self.is_closed = True
        self.home.leave(self)
        if self.task is not None:
            self.task.cancel()
        for row in self.rows:
            if row.waiting is not None and not row.waiting.answer.done():
                row.waiting.answer.cancel()

    # ---- the agent's side -------------------------------------------------------------------------------------------

    async def _run(self, client: Any, start: Start) -> None:
        values = {name: value for name, value in taken_by(self.function, start.values).items() if name != CLIENT}
        try:
            result = await self.function(client, **values)
            with checking("the agent", result, "the reward, a number"):
                self._end_rows(number(result))
        except BaseException as error:
            is_limit = isinstance(error, Exception) and not isinstance(error, UserError)
            is_limit = is_limit and len(self.rows) > 1 and any(row.is_over for row in self.rows)
            self._end_rows(0.0 if is_limit else error)

    def _end_rows(self, event: float | BaseException) -> None:
        """Ends all rows with a reward or an error."""
        for row in self.rows:
            row.events.put_nowait(event)

    async def create(self, body: dict[str, Any], *, is_again: bool = False) -> dict[str, Any]:
        """Answers a request with a completion. Raises Refused. is_again: its client says that it has sent it before."""
        try:
            if self.is_closed or (len(self.rows) == 1 and self.rows[0].is_over):
                raise Refused(*OVER)
            waiting = [row.waiting for row in self.rows if row.waiting is not None and row.waiting.body == body]
            request = waiting[0] if is_again and waiting else self._take(body)
        except Refused as error:
            self.num_refused += 1
            self.num_changed += error.code == CHANGED
            if self.num_refused > MOST_REFUSED:
                self._end_rows(UserError(f"the agent goes on after {MOST_REFUSED} errors such as: {error}"))
            raise
        return await asyncio.shield(request.answer)

    def _take(self, body: dict[str, Any]) -> Request:
        """Takes a new request. Raises Refused."""
        wrong = refused_option(body, self.home.drawing)
        wrong = f"a request of the agent has {wrong}" if wrong else wrong
        if len(self.rows) == 1 and self.rows[0].waiting is not None:
            wrong = (
                "the agent sends a request while another one waits: let it send one after the other, or give an "
                "episode several rows (episode.rows=4)"
            )
        if wrong:
            self._end_rows(UserError(wrong))
            raise Refused("invalid_request", wrong)
        return self._row_of(body.get("messages") or [], body.get("tools") or None).take(body)

    def _row_of(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> AgentRow:
        """Returns the row that a request extends, or else one that it opens. Raises Refused."""
        if len(self.rows) == 1 and self.rows[0].key:
            return self.rows[0]
        for row in self.rows:
            if row.key and row.waiting is None and row.conversation.is_extended_by(messages, tools):
                if row.is_over:
                    raise Refused(*OVER)
                return row
        text = json.dumps([list(map(plain, messages)), tools], sort_keys=True)
        begin = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
        key, known = f"{begin}-{self.num_opened[begin]}", self.opened.values()
        free = [row for index, row in enumerate(self.rows) if not row.key and index not in known]
        free = [self.rows[self.opened[key]]] if key in self.opened else free
        if not free:
            num = len(self.rows)
            raise Refused(CHANGED, f"the request extends none of the {num} rows of this episode: raise episode.rows")
        self.num_opened[begin] += 1
        free[0].key = key
        return free[0]


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
