"""Environments of this program in one episode, and how code of the user is called: functions as tools, and a class with
reset(), tools or step(), and get_reward().

These run in a worker process. Functions of the user may be async; others run in a thread, so that episodes do not wait
for one another.
"""

import asyncio
import inspect
import json
import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.errors import UserError

MOST_ERROR = 300  # characters of an error that a model gets
ADDRESS = re.compile(r"<.* at 0x[0-9a-f]+>")  # in the text of an object that has none of its own
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
ANSWER_ROLES = ("user", "tool")  # of messages that answer a turn
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Start:
    """What an episode begins with.

    columns: of the row.
    prompt: its text.
    messages: its conversation, if it is one.
    seed: the same for all episodes of a group.
    sample_seed: of this one.
    episode_id: the same in a resumed run.
    """

    columns: dict[str, Any]
    prompt: str
    messages: list[Message] | None
    seed: int
    sample_seed: int
    episode_id: str = ""

    @property
    def values(self) -> dict[str, Any]:
        """The columns, and seeds where no column has their names."""
        return {"seed": self.seed, "sample_seed": self.sample_seed} | self.columns


@dataclass(frozen=True, slots=True)
class Opening:
    """How an environment changes the prompt of its row; nothing is given: not at all. add: to the last message of the
    user. messages, text: the whole prompt instead. tools: that an agent names, in place of the environment's. key: of a
    row of an agent's episode; empty: it ended without this row."""

    add: str = ""
    messages: list[Message] | None = None
    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    key: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """The answer to a call or a turn.

    observation: text, or messages with the roles user or tool.
    has_failed: a tool has, and the observation says how.
    num_changed: requests of an agent before it that were refused, because they changed the conversation.
    """

    observation: str | list[Message] = ""
    reward: float = 0.0
    is_done: bool = False
    has_failed: bool = False
    num_changed: int = 0


class Session:
    """An environment in one episode; this one has nothing."""

    def row(self, index: int) -> "Session":
        """Returns the part of it that answers to a row of the episode."""
        return self

    async def begin(self, start: Start) -> Opening:
        return Opening()

    async def call(self, name: str, arguments: dict[str, Any]) -> Step:
        """Calls a tool."""
        raise NotImplementedError

    async def step(self, text: Any) -> Step:
        """Answers a turn. text: what it says; to an agent see agents.completion."""
        raise NotImplementedError

    def cut(self, text: Any) -> None:
        """Notes what the last turn says, as `step` takes it, if a limit has ended the episode in it."""

    async def reward(self) -> float:
        """Returns what the episode is worth beside the rewards of its steps."""
        return 0.0

    async def close(self) -> None:
        return None


class FunctionSession(Session):
    """Functions as tools."""

    def __init__(self, tools: Mapping[str, Callable[..., Any]]):
        self.tools = tools

    async def call(self, name: str, arguments: dict[str, Any]) -> Step:
        return await called_tool(self.tools, name, arguments)


class ObjectSession(Session):
    """An object of a class or of a factory, with `reset(**columns)`, tools as public methods (as in TRL) or
    `step(text)`, and perhaps `get_reward()` and `close()`."""

    def __init__(self, make: Callable[..., Any], tools: Sequence[str] = ()):
        self.make, self.names = make, tools

    async def begin(self, start: Start) -> Opening:
        self.object = await made(self.make)
        prompt = await called(self.object.reset, **taken_by(self.object.reset, start.values))
        with checking("reset()", prompt, "a text, a list of messages, or None"):
            if prompt is None or isinstance(prompt, str):
                return Opening(add=prompt or "")
            if prompt and all(part.get("type") == "text" for part in prompt):  # parts of a message, as in TRL
                return Opening(add="".join(part["text"] for part in prompt))
            return Opening(messages=messages_of(prompt))

    async def call(self, name: str, arguments: dict[str, Any]) -> Step:
        return await called_tool({name: getattr(self.object, name) for name in self.names}, name, arguments)

    async def step(self, text: str) -> Step:
        result = await called(self.object.step, text)
        with checking("step()", result, "(observation, reward, done): a text or messages, a number, a bool"):
            observation, reward, is_done = result
            is_text = not isinstance(observation, list)
            observation = text_of(observation) if is_text else messages_of(observation, ANSWER_ROLES)
            return Step(observation, number(reward), truth(is_done))

    async def reward(self) -> float:
        if not hasattr(self.object, "get_reward"):
            return 0.0
        result = await called(self.object.get_reward)
        with checking("get_reward()", result, "a number"):
            return number(result)

    async def close(self) -> None:
        if hasattr(self.object, "close"):
            await called(self.object.close)


# ---- calls ----------------------------------------------------------------------------------------------------------


async def called(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls a function of the user, async or not, and returns its result. Raises what it raises."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result, error = await asyncio.to_thread(_tried, function, args, kwargs)
    if error is not None:
        raise error
    return await result if inspect.isawaitable(result) else result


def _tried(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, BaseException | None]:
    """Calls a function. Returns its result, or the error that it raised: asyncio takes no StopIteration from a thread,
    and takes the CancelledError of a function for the end of the call."""
    try:
        return function(*args, **kwargs), None
    except BaseException as error:
        return None, error


async def made(make: Callable[..., Any], /, **kwargs: Any) -> Any:
    """Makes an object of a class of the user, or of a factory. OpenRLHF's may have an async __init__."""
    begin = vars(make).get("__init__")
    if not isinstance(make, type) or not inspect.iscoroutinefunction(begin):
        return await called(make, **kwargs)
    new: Any = object.__new__(make)
    await begin(new, **kwargs)
    return new


async def called_tool(tools: Mapping[str, Callable[..., Any]], name: str, arguments: dict[str, Any]) -> Step:
    """Calls a tool and returns its answer. What it raises is an answer, too."""
    if name not in tools:
        return no_tool(name, tools)
    try:
        result = await called(tools[name], **arguments)
        with checking(f"the tool {name}", result, "a text"):
            return Step(text_of(result))
    except BaseException as error:
        return failed(error)


def no_tool(name: str, tools: Mapping[str, Any]) -> Step:
    """Returns the answer to a call of a tool that is none."""
    return Step(f"error: there is no tool {name[:60]!r}; there are: {', '.join(tools)}", has_failed=True)


def failed(error: BaseException) -> Step:
    """Returns the answer of a tool that raised. An error of ours, and the end of the call, are passed on."""
    task = asyncio.current_task()
    if isinstance(error, UserError) or (task is not None and task.cancelling()):
        raise error
    message = ""
    with suppress(Exception):  # of the error's own method
        message = " ".join(f": {error}".split())[:MOST_ERROR]
    return Step(f"error: {type(error).__name__}{message}".removesuffix(":"), has_failed=True)


def taken_by(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those values that a function takes by their names."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(values)
    by_name = {name for name, parameter in parameters.items() if parameter.kind in BY_NAME}
    return {name: value for name, value in values.items() if name in by_name}


# ---- results --------------------------------------------------------------------------------------------------------


@contextmanager
def checking(what: str, result: Any, wanted: str) -> Iterator[None]:
    """Runs a block that takes a result of the user apart. Raises UserError if that has another form.

    what: gave the result.
    wanted: what it is to return.
    """
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError):
        shown = " ".join(str(result).split())[:80]
        raise UserError(f"{what} gave {shown!r} ({type(result).__name__}): return {wanted}") from None


def text_of(value: Any) -> str:
    """Returns a result as text: lists and dicts as JSON, sets as sorted lists, bytes as UTF-8. Raises ValueError for an
    object without a text, which would be another one in each run."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="replace")
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    if ADDRESS.fullmatch(str(value)):
        raise ValueError
    return str(value)


def number(value: Any) -> float:
    """Returns a reward, maybe of numpy or torch, as a number. Raises TypeError for what is not a number, and
    FloatingPointError for NaN and infinity, which can depend on the episode: an error of the environment."""
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError
    if not math.isfinite(value):
        raise FloatingPointError(f"a reward is {value}: return a finite number")
    return float(value)


def truth(value: Any) -> bool:
    """Returns a result that is True or False, maybe of numpy or torch. Raises TypeError."""
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, bool):
        raise TypeError
    return value


def messages_of(values: Any, roles: Sequence[str] = ()) -> list[Message]:
    """Returns messages as dicts that JSON can hold. Raises ValueError, TypeError or KeyError. roles: that they may
    have; empty: any."""
    messages = json.loads(json.dumps([dict(value) for value in values]))
    for message in messages:
        if not isinstance(message["content"], str) or not isinstance(message["role"], str):
            raise TypeError
        if roles and message["role"] not in roles:
            raise ValueError
    if not messages and not roles:
        raise ValueError
    return messages
