"""One episode with each kind of environment: what its methods are called with, and what their results mean.

These run in a worker process. Functions of the user may be async; others run in a thread, so that episodes do not wait
for one another.
"""

import asyncio
import functools
import inspect
import json
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rlhf_spmd.errors import UserError

MOST_THREADS = 512  # of calls that run at once in a worker; those that hang keep theirs
MOST_ERROR = 300  # characters of an error that a model is told
ADDRESS = re.compile(r"<.* at 0x[0-9a-f]+>")  # in the text of an object that has none of its own
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
Message = dict[str, Any]

hanging: set[Future[Any]] = set()  # calls in this process that still run although their time is over


@dataclass(frozen=True, slots=True)
class Start:
    """What an episode begins with.

    columns: of the row.
    prompt: its text.
    messages: its conversation, if it is one.
    seed: the same for all episodes of a group.
    sample_seed: of this one.
    """

    columns: dict[str, Any]
    prompt: str
    messages: list[Message] | None
    seed: int
    sample_seed: int

    @property
    def given(self) -> dict[str, Any]:
        """The columns, and seeds where no column has their names."""
        return {"seed": self.seed, "sample_seed": self.sample_seed} | self.columns


@dataclass(frozen=True, slots=True)
class Opening:
    """How an environment changes the prompt of its row; nothing is given: not at all. add: to the last message of the
    user. messages, text: the whole prompt instead."""

    add: str = ""
    messages: list[Message] | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What comes back.

    back: text, or messages with the roles user or tool.
    has_failed: a tool has, and text says how.
    logs: further numbers.
    """

    back: str | list[Message] = ""
    reward: float = 0.0
    is_done: bool = False
    has_failed: bool = False
    logs: dict[str, float] = field(default_factory=dict)


class Episode:
    """An episode with an environment that has none of these methods."""

    async def begin(self, start: Start) -> Opening:
        return Opening()

    async def call(self, name: str, arguments: dict[str, Any]) -> Step:
        """Calls a tool."""
        raise NotImplementedError

    async def step(self, text: str) -> Step:
        """Answers a turn."""
        raise NotImplementedError

    async def reward(self) -> float:
        """Returns what the episode is worth beside the rewards of its steps."""
        return 0.0

    async def save(self) -> Any:
        return None

    async def load(self, state: Any) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        return None


class Functions(Episode):
    """Functions as tools."""

    def __init__(self, tools: Mapping[str, Callable[..., Any]]):
        self.tools = tools

    async def call(self, name: str, arguments: dict[str, Any]) -> Step:
        return await called_tool(self.tools, name, arguments)


class OfReset(Episode):
    """An object with `reset(**columns)`, tools as public methods (TRL) or `step(text)`, and perhaps `get_reward()`,
    `save()` with `load(state)`, and `close()`."""

    def __init__(self, cls: Callable[..., Any], tools: Sequence[str]):
        self.cls, self.names = cls, tools

    async def begin(self, start: Start) -> Opening:
        self.own = await made(self.cls)
        if not hasattr(self.own, "reset"):
            return Opening()
        found = await called(self.own.reset, **taken_by(self.own.reset, start.given))
        if found is None or isinstance(found, str):
            return Opening(add=found or "")
        if isinstance(found, list) and found and all(isinstance(one, Mapping) and "type" in one for one in found):
            return Opening(add="".join(map(text_part, found)))
        if isinstance(found, list) and found:
            return Opening(messages=[checked_message(one, "reset()") for one in found])
        what = kind(found) if found else f"an empty {type(found).__name__}"
        raise UserError(f"reset() returned {what}: return a text, a list of messages, or None")

    async def call(self, name: str, arguments: dict[str, Any]) -> Step:
        return await called_tool({name: getattr(self.own, name) for name in self.names}, name, arguments)

    async def step(self, text: str) -> Step:
        found = await called(self.own.step, text)
        if not isinstance(found, tuple) or len(found) != 3:
            length = f" of {len(found)} values" if isinstance(found, tuple) else ""
            raise UserError(f"step() returned {kind(found)}{length}: return (observation, reward, done)")
        observation, reward, is_done = found
        back = observation if isinstance(observation, list) else text_of(observation, "step()")
        return Step(checked_back(back), number(reward, "the reward of step()"), truth(is_done, "done of step()"))

    async def reward(self) -> float:
        if not hasattr(self.own, "get_reward"):
            return 0.0
        return number(await called(self.own.get_reward), "get_reward()")

    async def save(self) -> Any:
        return in_json(await called(self.own.save), "save()")

    async def load(self, state: Any) -> None:
        await called(self.own.load, state)

    async def close(self) -> None:
        if hasattr(self.own, "close"):
            await called(self.own.close)


class OfSkyRL(Episode):
    """A BaseTextEnv of SkyRL-Gym: `init(prompt)`, `step(action)`, `close()`; made with its config, which is empty here,
    and the columns as extras."""

    def __init__(self, cls: Callable[..., Any]):
        self.cls = cls

    async def begin(self, start: Start) -> Opening:
        self.own = await made(self.cls, **taken_by(self.cls, {"env_config": Settings(), "extras": start.given}))
        prompt = start.messages or [{"role": "user", "content": start.prompt}]
        found = await called(self.own.init, [dict(one) for one in prompt])
        if not isinstance(found, tuple) or len(found) != 2:
            raise UserError(f"init() returned {kind(found)}: return (messages, metadata)")
        messages = [checked_message(one, "init()") for one in found[0]]
        return Opening() if messages == prompt else Opening(messages=messages)

    async def step(self, text: str) -> Step:
        found = await called(self.own.step, text)
        if not isinstance(found, Mapping) or not {"observations", "reward", "done"} <= {*found}:
            raise UserError(f"step() returned {kind(found)}: return a BaseTextEnvStepOutput")
        if found.get("postprocessed_action") not in (None, text):
            raise UserError(
                "step() returned a postprocessed_action, which is not supported, since what the model drew is never "
                "replaced: leave it out"
            )
        reward = number(found["reward"], "the reward of step()")
        return Step(checked_back(list(found["observations"])), reward, truth(found["done"], "done of step()"))

    async def close(self) -> None:
        if hasattr(self.own, "close"):
            await called(self.own.close)


class OfOpenRLHF(Episode):
    """An AgentInstance of OpenRLHF: async `reset(states)` and `step(states)`, which speak in dicts. Its feedback is
    appended as it is, without a chat template."""

    def __init__(self, cls: Callable[..., Any]):
        self.cls = cls

    async def begin(self, start: Start) -> Opening:
        self.own = await made(self.cls)
        label = start.columns.get("label", start.columns.get("labels"))
        self.states = start.given | {"label": label}
        found = await called(self.own.reset, self.states | {"prompt": start.prompt, "observation": start.prompt})
        if not isinstance(found, Mapping) or not isinstance(found.get("observation"), str):
            raise UserError(f"reset() returned {kind(found)}: return a dict with an observation, which is text")
        self.text = found["observation"]
        return Opening() if self.text == start.prompt else Opening(text=self.text)

    async def step(self, text: str) -> Step:
        states = self.states | {"observation_text": self.text, "action_text": text, "sampling_params": None}
        found = await called(self.own.step, states)
        if not isinstance(found, Mapping) or not {"rewards", "environment_feedback", "done"} <= {*found}:
            raise UserError(f"step() returned {kind(found)}: return a dict with rewards, environment_feedback and done")
        for name in ("sampling_params", "images", "environment_images"):
            if found.get(name) is not None:
                raise UserError(f"step() returned {name}, which is not supported: leave it out")
        feedback = text_of(found["environment_feedback"], "the environment_feedback of step()")
        self.text += text + feedback
        logs = {name: number(value, name) for name, value in (found.get("extra_logs") or {}).items()}
        reward = number(found["rewards"], "the rewards of step()")
        return Step(feedback, reward, truth(found["done"], "done of step()"), logs=logs)


@dataclass(frozen=True, slots=True)
class VerlTool:
    """A tool of verl with its entry in the file of tools. schema: in OpenAI's form; None: the class has its own."""

    cls: type
    config: dict[str, Any] = field(default_factory=dict)
    schema: dict[str, Any] | None = None

    def made(self) -> Any:
        schema = self.schema
        if schema is not None:
            with suppress(ImportError):  # a class that does not need it
                from verl.tools.schemas import OpenAIFunctionToolSchema

                schema = OpenAIFunctionToolSchema.model_validate(schema)
        return self.cls(**taken_by(self.cls, {"config": self.config, "tool_schema": schema}))


class OfVerl(Episode):
    """BaseTools of verl: async `create`, `execute`, `calc_reward`, `release`. An instance of each lives as long as the
    episode. The column tools_kwargs gives what each is created with."""

    def __init__(self, tools: Mapping[str, VerlTool]):
        self.tools = tools

    async def begin(self, start: Start) -> Opening:
        self.made = {name: tool.made() for name, tool in self.tools.items()}
        self.ids: dict[str, str] = {}
        given = start.columns.get("tools_kwargs") or {}
        for name, tool in self.made.items():
            kwargs = (given.get(name) or {}).get("create_kwargs") or {}
            known = {"seed": start.seed, "sample_seed": start.sample_seed, "create_kwargs": kwargs} | kwargs
            found = await called(tool.create, **taken_by(tool.create, known))
            self.ids[name] = found[0] if isinstance(found, tuple) else found
        return Opening()

    async def call(self, name: str, arguments: dict[str, Any]) -> Step:
        if name not in self.made:
            return no_tool(name, self.made)
        try:
            found = await called(self.made[name].execute, self.ids[name], arguments)
        except BaseException as error:
            return failed(error)
        if not isinstance(found, tuple) or len(found) != 3:
            raise UserError(f"execute() of {name} returned {kind(found)}: return (response, reward, metrics)")
        response, reward, metrics = found
        for what in ("image", "video"):
            if getattr(response, what, None):
                raise UserError(f"execute() of {name} returned an {what}, which is not supported: return text")
        text = text_of(getattr(response, "text", response), f"execute() of {name}")
        logs = {one: float(value) for one, value in (metrics or {}).items() if isinstance(value, numbers.Real)}
        return Step(text, number(reward or 0.0, f"the reward of execute() of {name}"), logs=logs)

    async def reward(self) -> float:
        total = 0.0
        for name, tool in self.made.items():
            if hasattr(tool, "calc_reward"):
                total += number(await called(tool.calc_reward, self.ids[name]) or 0.0, f"calc_reward() of {name}")
        return total

    async def close(self) -> None:
        for name, tool in self.made.items():
            if hasattr(tool, "release"):
                await called(tool.release, self.ids[name])


class Settings(dict):
    """An empty config, whose values may be read as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the config of the environment has no {name!r}") from None


# ---- calls ----------------------------------------------------------------------------------------------------------


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="environment")


async def called(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls a function of the user, async or not, and returns its result. Raises what it raises."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    running = _threads().submit(_tried, function, args, kwargs)
    try:
        found, error = await asyncio.wrap_future(running)
    except asyncio.CancelledError:  # its time is over, and a thread cannot be ended
        if not running.cancelled():
            hanging.add(running)
            running.add_done_callback(hanging.discard)
        raise
    if error is not None:
        raise error
    return await found if inspect.isawaitable(found) else found


def _tried(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, BaseException | None]:
    """Calls a function. Returns its result, or the error that it raised: asyncio takes no StopIteration from a thread,
    and takes the CancelledError of a function for the end of the call."""
    try:
        return function(*args, **kwargs), None
    except BaseException as error:
        return None, error


async def made(cls: Callable[..., Any], /, **kwargs: Any) -> Any:
    """Makes an object of a class of the user, or of a factory. OpenRLHF's may have an async __init__."""
    begin = vars(cls).get("__init__")
    if not isinstance(cls, type) or not inspect.iscoroutinefunction(begin):
        return await called(cls, **kwargs)
    own: Any = object.__new__(cls)
    await begin(own, **kwargs)
    return own


async def called_tool(tools: Mapping[str, Callable[..., Any]], name: str, arguments: dict[str, Any]) -> Step:
    """Calls a tool and returns its answer. What it raises is an answer, too."""
    if name not in tools:
        return no_tool(name, tools)
    try:
        return Step(text_of(await called(tools[name], **arguments), f"the tool {name}"))
    except BaseException as error:
        return failed(error)


def no_tool(name: str, tools: Mapping[str, Any]) -> Step:
    return Step(f"error: there is no tool {name[:60]!r}; there are: {', '.join(tools)}", has_failed=True)


def failed(error: BaseException) -> Step:
    """Returns the answer of a tool that raised. An error of ours, and the end of the call, are passed on."""
    task = asyncio.current_task()
    if isinstance(error, UserError) or (task is not None and task.cancelling()):
        raise error
    message = ""
    with suppress(Exception):  # of the error's own method
        message = " ".join(str(error).split())[:MOST_ERROR]
    return Step(f"error: {type(error).__name__}{': ' if message else ''}{message}", has_failed=True)


def taken_by(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the given values that a function takes by their names."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters and parameters[name].kind in BY_NAME}


# ---- results --------------------------------------------------------------------------------------------------------


def kind(value: Any) -> str:
    name = type(value).__name__
    return f"a{'n' if name[0] in 'aeiou' else ''} {name}"


def text_of(value: Any, what: str) -> str:
    """Returns a result as text: lists and dicts as JSON, sets as sorted lists, bytes as UTF-8. Raises UserError for an
    object without a text, which would be another one in each run.

    what: returned it.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="replace")
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    text = json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else str(value)
    if not isinstance(value, list | dict) and ADDRESS.fullmatch(text):
        raise UserError(f"{what} returned {kind(value)}, which has no text of its own ({text[:80]}): return a text")
    return text


def in_json(value: Any, what: str) -> Any:
    """Returns the value itself. Raises UserError unless JSON gives it back. what: returned it."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{what} returned what JSON cannot hold ({error}): return texts, numbers, lists and dicts"
        ) from None
    if key := _no_text(value):
        raise UserError(f"{what} returned a dict with the key {key}, of which JSON makes text: make it text yourself")
    return value


def _no_text(value: Any) -> str:
    """Finds a key of a dict in a value that is not a text; empty: there is none."""
    inside = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    own = [repr(key)[:60] for key in value if not isinstance(key, str)] if isinstance(value, dict) else []
    return next(filter(None, [*own, *map(_no_text, inside)]), "")


def number(value: Any, what: str) -> float:
    """Converts a reward to a number. Raises UserError for what is not a number, and ValueError for NaN and infinity,
    which can depend on the episode, so that they are handled as an error of the environment."""
    if hasattr(value, "item"):  # of numpy or torch
        with suppress(ValueError, RuntimeError, TypeError):  # it has several
            value = value.item()
    if isinstance(value, numbers.Real):
        if math.isfinite(value):
            return float(value)
        raise ValueError(f"{what} is {value}: return a finite number")
    raise UserError(f"{what} is {str(value)[:60]!r} ({kind(value)}): return a finite number")


def truth(value: Any, what: str) -> bool:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, bool):
        raise UserError(f"{what} is {str(value)[:60]!r} ({kind(value)}): return True or False")
    return value


def checked_back(back: str | list[Any]) -> str | list[Message]:
    """Checks that an observation is text or messages. Raises UserError."""
    if isinstance(back, str):
        return back
    messages = [checked_message(one, "step()") for one in back]
    for one in messages:
        if one["role"] not in ("user", "tool"):
            raise UserError(f"step() returned a message of the {one['role']}: only user and tool may answer a turn")
    return messages


def text_part(part: Mapping[str, Any]) -> str:
    """Returns the text of a part of a message, which may have parts of other types. Raises UserError for these."""
    if part["type"] != "text" or not isinstance(part.get("text"), str):
        raise UserError(f"reset() returned a part of type {part['type']!r}, which is not supported: return text")
    return part["text"]


def checked_message(value: Any, what: str) -> Message:
    if not isinstance(value, Mapping) or not all(isinstance(value.get(name), str) for name in ("role", "content")):
        raise UserError(f"{what} returned {kind(value)} as a message: return dicts with role and content, as text")
    return in_json(dict(value), what)
