"""Recognises tools and environments by the names of their methods, whichever program they were written for.

    functions                          tools without a state
    reset(**columns), public methods   tools with a state, as in TRL
    reset(**columns), step(text)       -> (observation, reward, done)
    init(prompt), step(action)         BaseTextEnv of SkyRL-Gym
    reset(states), step(states)        AgentInstance of OpenRLHF
    create, execute                    BaseTool of verl; with a file of tools (.yaml), or a list of classes

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
from rlhf_spmd.runtime.environments.native import BY_NAME, FunctionSession, ObjectSession, Session, kind_of
from rlhf_spmd.runtime.environments.others import (
    OpenRLHFSession,
    SkyRLSession,
    VerlSession,
    VerlTool,
    has_methods,
    tools_by_name,
    verl_tools,
)

NOT_TOOLS = ("reset", "get_reward", "close", "step")
CHOICE = "environment"  # the column that names one of several
SEEDS = ("seed", "sample_seed")
STEPS = "give it reset(**columns) and step(text)"
# method -> whose it is and what is to be named instead
UNSUPPORTED = {
    "initial_observation": f"an Env of tinker, which speaks in tokens: {STEPS}",
    "arun_episode": f"a workflow of AReaL, which asks a server: {STEPS}",
    "env_response": f"an environment of verifiers, which asks a server: {STEPS}",
    "run": "an agent loop (as of verl), which calls the model itself: name its tools instead",
    "generate": f"an agent that calls the model itself: {STEPS}",
    "execute": "an executor (as of OpenRLHF), which calls the model itself: name its AgentInstance instead",
}
OF_SLIME = {"args", "sample", "sampling_params"}  # parameters of a function that generates


@dataclass(frozen=True, slots=True)
class Environment:
    """What is known of an environment before it is used.

    speaks: tools (calls in the model's format), chat (a turn is answered by messages) or text (as it is).
    tools: their names.
    is_stateless: its answers depend on the call alone.
    """

    name: str
    speaks: str
    make: Callable[[], Session]
    tools: tuple[str, ...] = ()
    is_stateless: bool = False
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # the tools, to be described
    described: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # or their descriptions
    key: str = ""  # its name in the column CHOICE, if there are several

    def schemas(self, describe: Callable[[Callable[..., Any]], dict[str, Any]]) -> list[dict[str, Any]]:
        """Describes the tools for chat templates. Raises UserError for a tool without types or docstring.

        describe: makes it from a function's signature and docstring, as model.hf.tool_schema does.
        """
        with naming(f"environment {self.name!r}"):
            return [*self.described.values(), *(describe(function) for function in self.functions.values())]


def load_environments(spec: str, columns: Sequence[str] | None = None) -> dict[str, Environment]:
    """Loads `FILE.py:Name` or `module:Name` -> the environments by their name in the column CHOICE; the only one is
    called "". columns: of the data set; None: not known. Raises UserError with the fix."""
    with naming(f"environment {spec!r}"):
        if spec.endswith((".yaml", ".yml")):
            return {"": _of_verl(spec, verl_tools(spec))}
        module, name = load_named(spec, "Name", "environment")
        if not hasattr(module, name):
            own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
            there = f": it has {', '.join(sorted(own)[:10])}" if own else ""
            raise UserError(f"{spec.rpartition(':')[0]} has no {name!r}{did_you_mean(name, own) or there}")
        named = getattr(module, name)
        if not isinstance(named, Mapping):
            return {"": _recognised(spec, named, columns)}
        if not named:
            raise UserError(f"{name} is empty: give it an environment by its name")
        if columns is not None and CHOICE not in columns:
            raise UserError(f"{name} has several environments, and the data set has no column {CHOICE!r}: add one")
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
    if isinstance(named, list | tuple) and named and all(has_methods(tool, "create", "execute") for tool in named):
        return _of_verl(spec, [VerlTool(tool) for tool in named])
    if inspect.isroutine(named) or isinstance(named, list | tuple):
        return _of_functions(spec, named if isinstance(named, list | tuple) else [named])
    raise UserError(f"it is {kind_of(named)}: name a class, a function, a list of functions, or a dict of classes")


def _made_by(named: Any) -> Any:
    """Returns the class of the environments that a factory makes, as TRL's environment_factory does: a partial call of
    the class, or a function that is annotated to return it. None: it is not a factory."""
    if isinstance(named, functools.partial) and inspect.isclass(named.func):
        return named.func
    if not inspect.isfunction(named):
        return None
    with suppress(Exception):  # of annotations that name what is not there
        cls = typing.get_type_hints(named).get("return")
        if has_methods(cls, "reset") or has_methods(cls, "init", "step"):
            return cls
    return None


def _of_functions(spec: str, functions: Sequence[Any]) -> Environment:
    tools: dict[str, Callable[..., Any]] = {}
    for function in functions:
        if not inspect.isroutine(function):
            raise UserError(f"its tools are functions, and {str(function)[:60]} is {kind_of(function)}")
        if {*inspect.signature(function).parameters} >= OF_SLIME:
            raise UserError(
                f"{function.__name__} calls the model itself (as slime's generate functions do), which is not "
                "supported: name its tools instead"
            )
        tools[function.__name__] = function
    if not tools:
        raise UserError("the list of tools is empty")
    if len(tools) < len(functions):
        raise UserError(f"several tools have the same name ({', '.join(tools)}): rename one")
    _refuse_once(tools)
    return Environment(spec, "tools", lambda: FunctionSession(tools), tuple(tools), is_stateless=True, functions=tools)


def _refuse_once(tools: Mapping[str, Any]) -> None:
    """Raises UserError for a tool that says that it must not be called twice, which nothing can promise."""
    for name, tool in tools.items():
        if getattr(tool, "once", False):
            raise UserError(
                f"the tool {name} says once=True, but a resumed run, and an environment that is made anew, repeat "
                "calls: let it do nothing for an rlhf_spmd.tools.episode_id() and a call that it has seen, and remove "
                "`once`"
            )


def _of_class(spec: str, cls: Any, columns: Sequence[str] | None, make: Callable[..., Any]) -> Environment:
    """Recognises the program of a class.

    make: makes an object of the class.
    """
    if has_methods(cls, "create", "execute"):
        return _of_verl(spec, [VerlTool(cls)])
    if has_methods(cls, "init", "step") and not has_methods(cls, "reset"):
        return Environment(spec, "chat", lambda: SkyRLSession(make))
    public = [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))]
    for name, why in UNSUPPORTED.items():
        if name in public and "reset" not in public:
            raise UserError(f"its method {name} makes it {why}")
    if "step" in public:
        parameters = [*inspect.signature(cls.step).parameters.values()][1:]
        by_name = [parameter for parameter in parameters if parameter.kind in BY_NAME]
        if "reset" in public and by_name and by_name[0].name == "states":
            return Environment(spec, "text", lambda: OpenRLHFSession(make))
        needed = [parameter.name for parameter in by_name if parameter.default is parameter.empty]
        if len(needed) > 1 or not parameters:
            raise UserError(f"its step() takes {', '.join(needed) or 'nothing'}: take the text of a turn, and no more")
    tools = tuple(name for name in public if name not in NOT_TOOLS and not inspect.isclass(getattr(cls, name)))
    if "reset" not in public:
        has = f" (it has {', '.join(public)})" if public else ""
        raise UserError(f"it has no reset(){has}: add reset(self, **columns), and tools as methods or step(text)")
    _check_reset(cls, columns)
    if "step" in public:
        return Environment(spec, "chat", lambda: ObjectSession(make, ()))
    if not tools:
        raise UserError("it has reset() and nothing to call: add public methods as tools, or step(self, text)")
    methods = {name: getattr(cls, name) for name in tools}
    _refuse_once(methods)
    functions = {name: types.MethodType(inspect.unwrap(method), object()) for name, method in methods.items()}
    return Environment(spec, "tools", lambda: ObjectSession(make, tools), tools, functions=functions)


def _check_reset(cls: Any, columns: Sequence[str] | None) -> None:
    """Raises UserError if reset() asks for what the data set lacks, or cannot get what it has."""
    if columns is None:
        return
    own, *parameters = inspect.signature(cls.reset).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if takes_all and own.name in columns and own.kind is own.POSITIONAL_OR_KEYWORD:
        raise UserError(
            f"its reset() gets all columns of the data set, and one is called {own.name!r}, as its own first "
            f"parameter: write reset({own.name}, /, **columns), or rename the column"
        )
    for parameter in parameters:
        is_needed = parameter.default is parameter.empty and parameter.kind in (*BY_NAME, parameter.POSITIONAL_ONLY)
        if is_needed and parameter.name not in (*columns, *SEEDS):
            there = ", ".join(columns) or "there is none besides the prompts"
            hint = did_you_mean(parameter.name, [*columns, *SEEDS])
            raise UserError(
                f"its reset() asks for {parameter.name}, which is not a column of the data set ({there}), nor one of "
                f"{', '.join(SEEDS)}{hint}: add the column, or rename the parameter"
            )


def _of_verl(spec: str, tools: Sequence[VerlTool]) -> Environment:
    named = tools_by_name(tools)
    _refuse_once({name: tool.cls for name, tool in named.items()})
    described = {name: tool.described() for name, tool in named.items()}
    return Environment(spec, "tools", lambda: VerlSession(named), tuple(named), described=described)
