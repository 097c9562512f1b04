"""Recognises tools and environments by the names of their methods, whichever program they were written for.

    functions                          tools without a state
    reset(**columns), public methods   tools with a state, as in TRL
    reset(**columns), step(text)       -> (observation, reward, done)
    init(prompt), step(action)         BaseTextEnv of SkyRL-Gym
    reset(states), step(states)        AgentInstance of OpenRLHF
    create, execute                    BaseTool of verl; with a file of tools (.yaml), or a list of classes
    run(client, **columns)             an agent that asks the model by a client of OpenAI's form (agents.py)

A dict of classes by name has one for each value of the column `environment`. What an environment of another program has
that is not supported is refused by its name.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.config import naming
from rlhf_spmd.pages.named_objects import load_named
from rlhf_spmd.pages.option_suggestions import did_you_mean
from rlhf_spmd.runtime.data.readers import no_column
from rlhf_spmd.runtime.environments.agents import CLIENT, AgentSession, is_agent, no_endpoint
from rlhf_spmd.runtime.environments.native import BY_NAME, FunctionSession, ObjectSession, Session
from rlhf_spmd.runtime.environments.others import (
    OpenRLHFSession,
    SkyRLSession,
    VerlSession,
    VerlTool,
    has_methods,
    verl_tools,
)

NOT_TOOLS = ("reset", "get_reward", "close", "step")
CHOICE = "environment"  # the column that names one of several
SEEDS = ("seed", "sample_seed")
ASKS_THE_MODEL = (
    "calls the model itself, as agents of tinker, AReaL, verifiers, verl, slime and executors of OpenRLHF do: name its "
    "tools, its AgentInstance, or a class with reset(**columns) and step(text)"
)
CALLS_THE_MODEL = {"initial_observation", "arun_episode", "env_response", "run", "generate", "execute"}  # methods
OF_SLIME = {"args", "sample", "sampling_params"}  # parameters of a function that generates


@dataclass(frozen=True, slots=True)
class Environment:
    """What is known of an environment before it is used.

    speaks: tools (calls in the model's format), chat (a turn is answered by messages), text (as it is) or agent (a turn
        is the answer to a request).
    tools: functions, or their schemas, by name.
    is_stateless: its answers depend on the call alone.
    """

    name: str
    speaks: str
    make: Callable[[], Session]
    tools: Mapping[str, Callable[..., Any] | dict[str, Any]] = field(default_factory=dict)
    is_stateless: bool = False
    key: str = ""  # its name in the column CHOICE, if there are several

    def schemas(self, describe: Callable[[Callable[..., Any]], dict[str, Any]]) -> list[dict[str, Any]]:
        """Describes the tools for chat templates. Raises UserError for a tool without types or docstring.

        describe: makes it from a function's signature and docstring, as model.hf.tool_schema does.
        """
        with naming(f"environment {self.name!r}"):
            return [tool if isinstance(tool, dict) else describe(tool) for tool in self.tools.values()]


def load_environments(spec: str, columns: Sequence[str] | None = None) -> dict[str, Environment]:
    """Loads `FILE.py:Name` or `module:Name` -> the environments by their name in the column CHOICE; the only one is
    called "". columns: of the data set; None: not known. Raises UserError with the fix."""
    with naming(f"environment {spec!r}"):
        if spec.endswith((".yaml", ".yml")):
            return {"": _of_verl(spec, verl_tools(spec))}
        with no_endpoint():
            named = load_named(spec, "Name")
        if not isinstance(named, Mapping):
            return {"": _recognised(spec, named, columns)}
        if columns is not None and CHOICE not in columns:
            raise UserError(f"it has several environments, and the data set has no column {CHOICE!r}: add one")
        every = {str(key): _recognised(f"{spec}[{key!r}]", value, columns) for key, value in named.items()}
        return {key: replace(environment, key=key) for key, environment in every.items()}


def chosen(environments: Mapping[str, Environment], columns: Mapping[str, Any]) -> Environment:
    """Returns the environment of a row. Raises UserError."""
    if "" in environments:
        return environments[""]
    name = str(columns.get(CHOICE))
    if name not in environments:
        raise UserError(
            f"the column {CHOICE!r} says {name!r}, which is not one of {', '.join(environments)}"
            f"{did_you_mean(name, environments)}: correct the row"
        )
    return environments[name]


# ---- recognising ----------------------------------------------------------------------------------------------------


def _recognised(spec: str, named: Any, columns: Sequence[str] | None) -> Environment:
    cls = named if inspect.isclass(named) else _made_by(named)
    if cls is not None:
        return _of_class(spec, cls, columns, named)
    if is_agent(named):
        return _of_agent(spec, named, columns)
    listed = [*named] if isinstance(named, list | tuple) else [named]
    if listed and all(has_methods(tool, "create", "execute") for tool in listed):
        return _of_verl(spec, [VerlTool(tool) for tool in listed])
    if not listed or not all(map(inspect.isroutine, listed)):
        shown = f"{str(named)[:60]} ({type(named).__name__})"
        raise UserError(f"it is {shown}: name a class, a function, a list of functions, or a dict of classes")
    for function in listed:
        if {*inspect.signature(function).parameters} >= OF_SLIME:
            raise UserError(f"{function.__name__} {ASKS_THE_MODEL}")
    tools = _by_name([(function.__name__, function) for function in listed])
    return Environment(spec, "tools", lambda: FunctionSession(tools), tools, is_stateless=True)


def _made_by(named: Any) -> Any:
    """Returns the class of the environments that a factory makes, as TRL's environment_factory does: a partial call of
    the class, or a function that is annotated to return it. None: it is not a factory."""
    if isinstance(named, functools.partial) and inspect.isclass(named.func):
        return named.func
    cls = None
    with suppress(Exception):  # of annotations that name what is not there
        cls = typing.get_type_hints(named).get("return")
    return cls if has_methods(cls, "reset") or has_methods(cls, "init", "step") else None


def _by_name(named: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Returns tools by their names. Raises UserError if several have the same, or for one that says that it must not be
    called twice, which nothing can promise."""
    tools = dict(named)
    if len(tools) < len(named):
        raise UserError(f"several tools have the same name ({', '.join(tools)}): rename one")
    for name, tool in named:
        if getattr(getattr(tool, "cls", tool), "once", False):
            raise UserError(
                f"the tool {name} says once=True, but a resumed run, and an environment that is made anew, repeat "
                "calls: let it do nothing for an rlhf_spmd.tools.episode_id() and a call that it has seen, and remove "
                "`once`"
            )
    return tools


def _of_class(spec: str, cls: Any, columns: Sequence[str] | None, make: Callable[..., Any]) -> Environment:
    """Recognises the program of a class.

    make: makes an object of the class.
    """
    if has_methods(cls, "create", "execute"):
        return _of_verl(spec, [VerlTool(cls)])
    if has_methods(cls, "init", "step") and not has_methods(cls, "reset"):
        return Environment(spec, "chat", lambda: SkyRLSession(make))
    public = [name for name in dir(cls) if not name.startswith("_") and inspect.isroutine(getattr(cls, name))]
    if "reset" not in public:
        if not CALLS_THE_MODEL.isdisjoint(public):
            raise UserError(f"it {ASKS_THE_MODEL}")
        has = f" (it has {', '.join(public)})" if public else ""
        raise UserError(f"it has no reset(){has}: add reset(self, **columns), and tools or step(text)")
    if "step" in public:
        signature = inspect.signature(cls.step)
        if [*signature.parameters][1:2] == ["states"]:
            return Environment(spec, "text", lambda: OpenRLHFSession(make))
        with suppress(TypeError):
            signature.bind(None, "text")
            _check_columns("its reset()", cls.reset, columns)
            return Environment(spec, "chat", lambda: ObjectSession(make))
        raise UserError(f"its step() takes {', '.join(signature.parameters)}: take the text of a turn, and no more")
    tools = _by_name([(name, getattr(cls, name)) for name in public if name not in NOT_TOOLS])
    if not tools:
        raise UserError("it has reset() and nothing to call: add public methods as tools, or step(self, text)")
    _check_columns("its reset()", cls.reset, columns)
    methods = {name: types.MethodType(inspect.unwrap(method), object()) for name, method in tools.items()}
    return Environment(spec, "tools", lambda: ObjectSession(make, tuple(tools)), methods)


def _of_agent(spec: str, function: Any, columns: Sequence[str] | None) -> Environment:
    if not inspect.iscoroutinefunction(function):
        raise UserError(f"{function.__name__}({CLIENT}, ...) is not async: write async def, and await the client")
    _check_columns("it", function, columns)
    return Environment(spec, "agent", lambda: AgentSession(function))


def _check_columns(what: str, function: Any, columns: Sequence[str] | None) -> None:
    """Raises UserError if a function asks, behind its first parameter, for what the data set lacks."""
    if columns is None:
        return
    _, *parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        is_required = parameter.default is parameter.empty and parameter.kind in BY_NAME
        if is_required and parameter.name not in (*columns, *SEEDS):
            raise no_column(f"{what} asks for {parameter.name}", parameter.name, columns, SEEDS)


def _of_verl(spec: str, tools: Sequence[VerlTool]) -> Environment:
    schemas = [tool.described() for tool in tools]
    names = [schema["function"]["name"] for schema in schemas]
    named = _by_name([*zip(names, tools, strict=True)])
    return Environment(spec, "tools", lambda: VerlSession(named), dict(zip(names, schemas, strict=True)))
