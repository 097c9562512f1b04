"""Recognises tools and environments by the names of their methods, whichever program they were written for.

    functions                          tools without a state, typed and with a docstring; one, or a list of them
    reset(**columns), public methods   TRL's environments: the methods are tools; or a factory of them
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
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import read_bytes
from rlhf_spmd.model.config import naming
from rlhf_spmd.pages.named_objects import load_named
from rlhf_spmd.pages.option_suggestions import did_you_mean
from rlhf_spmd.runtime.environments.kinds import (
    BY_NAME,
    Episode,
    Functions,
    OfOpenRLHF,
    OfReset,
    OfSkyRL,
    OfVerl,
    VerlTool,
    kind,
)

RESERVED = ("reset", "get_reward", "save", "load", "close", "step")
CHOICE = "environment"  # the column that names one of several
SEEDS = ("seed", "sample_seed")
# method -> whose it is and what is to be named instead
UNSUPPORTED = {
    "initial_observation": "an Env of tinker, which speaks in tokens: give it reset(**columns) and step(text)",
    "arun_episode": "a workflow of AReaL, which asks a server: give it reset(**columns) and step(text)",
    "env_response": "an environment of verifiers, which asks a server: give it reset(**columns) and step(text)",
    "run": "an agent loop (as of verl), which calls the model itself: name its tools instead",
    "generate": "an agent that calls the model itself: give it reset(**columns) and step(text)",
    "execute": "an executor (as of OpenRLHF), which calls the model itself: name its AgentInstance instead",
}
OF_SLIME = {"args", "sample", "sampling_params"}  # parameters of a function that generates


@dataclass(frozen=True, slots=True)
class Environment:
    """What is known of an environment before it is used.

    speaks: tools (calls in the model's format), chat (a turn is answered by messages) or text (as it is).
    tools: their names.
    once: those that must not be called again after a failure.
    is_stateless: its answers depend on the call alone.
    saves: it has save() and load().
    """

    name: str
    speaks: str
    make: Callable[[], Episode]
    tools: tuple[str, ...] = ()
    once: frozenset[str] = frozenset()
    is_stateless: bool = False
    saves: bool = False
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
            return {"": _of_verl(spec, _listed_tools(spec))}
        module, name = load_named(spec, "Name", "environment")
        if not hasattr(module, name):
            own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
            there = f": it has {', '.join(sorted(own)[:10])}" if own else ""
            raise UserError(f"{spec.rpartition(':')[0]} has no {name!r}{did_you_mean(name, own) or there}")
        found = getattr(module, name)
        if not isinstance(found, Mapping):
            return {"": _recognised(spec, found, columns)}
        if not found:
            raise UserError(f"{name} is empty: give it an environment by its name")
        if columns is not None and CHOICE not in columns:
            raise UserError(f"{name} has several environments, and the data set has no column {CHOICE!r}: add one")
        every = {str(key): _recognised(f"{spec}[{key!r}]", one, columns) for key, one in found.items()}
        return {key: replace(one, key=key) for key, one in every.items()}


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


def _recognised(spec: str, found: Any, columns: Sequence[str] | None) -> Environment:
    if inspect.isclass(found):
        return _of_class(spec, found, columns, found)
    if (made := _made_by(found)) is not None:
        return _of_class(spec, made, columns, found)
    if isinstance(found, list | tuple):
        if found and all(inspect.isclass(one) and _has(one, "create", "execute") for one in found):
            return _of_verl(spec, [VerlTool(one) for one in found])
        return _of_functions(spec, found)
    if inspect.isroutine(found):
        return _of_functions(spec, [found])
    raise UserError(f"it is {kind(found)}: name a class, a function, a list of functions, or a dict of classes")


def _made_by(found: Any) -> Any:
    """Returns the class of the environments that a factory makes, as TRL's environment_factory does: a partial call of
    the class, or a function that is annotated to return it. None: it is not a factory."""
    if isinstance(found, functools.partial) and inspect.isclass(found.func):
        return found.func
    if not inspect.isfunction(found):
        return None
    with suppress(Exception):  # of annotations that name what is not there
        made = typing.get_type_hints(found).get("return")
        if inspect.isclass(made) and (_has(made, "reset") or _has(made, "init", "step")):
            return made
    return None


def _has(cls: Any, *names: str) -> bool:
    return all(callable(getattr(cls, name, None)) for name in names)


def _of_functions(spec: str, functions: Sequence[Any]) -> Environment:
    tools: dict[str, Callable[..., Any]] = {}
    for one in functions:
        if not inspect.isroutine(one):
            raise UserError(f"its tools are functions, and {str(one)[:60]} is {kind(one)}")
        if {*inspect.signature(one).parameters} >= OF_SLIME:
            raise UserError(
                f"{one.__name__} calls the model itself (as slime's generate functions do), which is not supported: "
                "name its tools instead"
            )
        tools[one.__name__] = one
    if not tools:
        raise UserError("the list of tools is empty")
    if len(tools) < len(functions):
        raise UserError(f"several tools have the same name ({', '.join(tools)}): rename one")
    once = frozenset(name for name, one in tools.items() if getattr(one, "once", False))
    return Environment(spec, "tools", lambda: Functions(tools), tuple(tools), once, is_stateless=True, functions=tools)


def _of_class(spec: str, cls: Any, columns: Sequence[str] | None, new: Callable[..., Any]) -> Environment:
    """Recognises the kind of a class.

    new: makes an object of the class.
    """
    if _has(cls, "create", "execute"):
        return _of_verl(spec, [VerlTool(cls)])
    if _has(cls, "init", "step") and not _has(cls, "reset"):
        return Environment(spec, "chat", lambda: OfSkyRL(new))
    own = [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))]
    for name, why in UNSUPPORTED.items():
        if name in own and "reset" not in own:
            raise UserError(f"its method {name} makes it {why}")
    saves = _has(cls, "save", "load")
    if "step" in own:
        parameters = [*inspect.signature(cls.step).parameters.values()][1:]
        names = [one.name for one in parameters if one.kind in BY_NAME]
        if "reset" in own and names[:1] == ["states"]:
            return Environment(spec, "text", lambda: OfOpenRLHF(new))
        if "message_log_batch" in names or "metadata" in names:
            raise UserError("its step() takes batches (as NeMo RL's environments do): take the text of one turn")
        needed = [one.name for one in parameters if one.default is one.empty and one.kind in BY_NAME]
        if len(needed) > 1 or not parameters:
            raise UserError(f"its step() takes {', '.join(needed) or 'nothing'}: take the text of a turn, and no more")
        if "reset" not in own:
            raise UserError("it has step() and no reset(): add reset(self, **columns), which begins an episode")
        _check_reset(cls, columns)
        return Environment(spec, "chat", lambda: OfReset(new, ()), saves=saves)
    reserved = RESERVED if saves else tuple(name for name in RESERVED if name not in ("save", "load"))
    tools = tuple(name for name in own if name not in reserved and not inspect.isclass(getattr(cls, name)))
    if "reset" not in own:
        has = f" (it has {', '.join(own)})" if own else ""
        raise UserError(f"it has no reset(){has}: add reset(self, **columns), and tools as methods or step(text)")
    if not tools:
        raise UserError("it has reset() and nothing to call: add public methods as tools, or step(self, text)")
    _check_reset(cls, columns)
    once = frozenset(name for name in tools if getattr(getattr(cls, name), "once", False))
    functions = {name: types.MethodType(inspect.unwrap(getattr(cls, name)), object()) for name in tools}
    return Environment(spec, "tools", lambda: OfReset(new, tools), tools, once, saves=saves, functions=functions)


def _check_reset(cls: Any, columns: Sequence[str] | None) -> None:
    """Raises UserError if reset() asks for what the data set lacks, or cannot get what it has."""
    parameters = [*inspect.signature(cls.reset).parameters.values()]
    own = [one.name for one in parameters[:1] if one.kind is one.POSITIONAL_OR_KEYWORD and one.name in (columns or ())]
    if own and any(one.kind is one.VAR_KEYWORD for one in parameters):
        raise UserError(
            f"its reset() gets all columns of the data set, and one is called {own[0]!r}, as its own first parameter: "
            f"write reset({own[0]}, /, **columns), or rename the column"
        )
    for one in parameters[1:]:
        is_needed = one.default is one.empty and one.kind in (*BY_NAME, one.POSITIONAL_ONLY)
        if is_needed and columns is not None and one.name not in (*columns, *SEEDS):
            there = ", ".join(columns) or "there is none besides the prompts"
            hint = did_you_mean(one.name, [*columns, *SEEDS])
            raise UserError(
                f"its reset() asks for {one.name}, which is not a column of the data set ({there}), nor one of "
                f"{', '.join(SEEDS)}{hint}: add the column, or rename the parameter"
            )


# ---- files of tools -------------------------------------------------------------------------------------------------


def _listed_tools(path: str) -> list[VerlTool]:
    """Returns the tools of a file in verl's form (multi_turn.tool_config_path). Raises UserError."""
    from rlhf_spmd.config.file import yaml_value

    try:
        values = yaml_value(read_bytes(path).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"it can't be read: {error}") from None
    listed = values.get("tools") if isinstance(values, dict) else None
    if not isinstance(listed, list) or not listed:
        raise UserError("it has no list `tools`: write class_name, config and tool_schema of each")
    found = []
    for entry in listed:
        if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
            raise UserError(f"an entry of `tools` has no class_name: {str(entry)[:80]}")
        target, _, name = entry["class_name"].rpartition(".")
        config = entry.get("config") or {}
        if config.get("type", "native") != "native":
            raise UserError(f"{entry['class_name']} has the type {config['type']!r}: only native ones are supported")
        beside = Path(path).parent / f"{target}.py"
        module, name = load_named(f"{beside if beside.is_file() else target}:{name}", "Name", "environment")
        cls = getattr(module, name, None)
        if not inspect.isclass(cls) or not _has(cls, "create", "execute"):
            raise UserError(f"{entry['class_name']} is not a class with create() and execute()")
        found.append(VerlTool(cls, config, entry.get("tool_schema")))
    return found


def _of_verl(spec: str, tools: Sequence[VerlTool]) -> Environment:
    described: dict[str, dict[str, Any]] = {}
    named: dict[str, VerlTool] = {}
    for tool in tools:
        schema = tool.schema
        if schema is None:
            try:
                own = tool.made()
                schema = own.get_openai_tool_schema()
            except Exception as error:  # whatever its class raises without a schema
                why = f"{type(error).__name__}: {error}"
                raise UserError(
                    f"{tool.cls.__name__} does not describe itself ({why}): name a file of tools (.yaml) with its "
                    "tool_schema, as verl's tool_config_path does"
                ) from None
        if hasattr(schema, "model_dump"):
            schema = schema.model_dump(exclude_unset=True, exclude_none=True)
        if not isinstance(schema, dict) or not isinstance((schema.get("function") or {}).get("name"), str):
            raise UserError(f"the tool_schema of {tool.cls.__name__} has no function with a name")
        name = schema["function"]["name"]
        described[name], named[name] = schema, tool
    if len(named) < len(tools):
        raise UserError(f"several tools have the same name ({', '.join(named)}): rename one")
    once = frozenset(name for name, tool in named.items() if getattr(tool.cls, "once", False))
    return Environment(spec, "tools", lambda: OfVerl(named), tuple(named), once, described=described)
