"""Environments of other programs in one episode: SkyRL-Gym, OpenRLHF and verl. TRL's are those of this program
(native.py).

What they have that is not supported is refused by its name.
"""

import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import read_bytes
from rlhf_spmd.pages.named_objects import load_named
from rlhf_spmd.runtime.environments.native import (
    Opening,
    Session,
    Start,
    Step,
    called,
    checked_messages,
    failed,
    made,
    no_tool,
    number,
    taken_by,
    text_of,
    truth,
    wrong,
)


def refuse(what: str, result: Any, *names: str) -> None:
    """Raises UserError if a result has something of these names, which is not supported. what: returned it."""
    for name in names:
        value = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
        if value is not None and not (isinstance(value, list) and not value):
            raise UserError(f"{what} returned {name}, which is not supported: leave it out")


class SkyRLSession(Session):
    """A BaseTextEnv of SkyRL-Gym: `init(prompt)`, `step(action)`, `close()`; made with its config, which is empty here,
    and the columns as extras."""

    def __init__(self, make: Callable[..., Any]):
        self.make = make

    async def begin(self, start: Start) -> Opening:
        self.object = await made(self.make, **taken_by(self.make, {"env_config": Settings(), "extras": start.values}))
        prompt = start.messages or [{"role": "user", "content": start.prompt}]
        found = await called(self.object.init, [dict(message) for message in prompt])
        if not isinstance(found, tuple) or len(found) != 2:
            raise wrong("init()", found, "return (messages, metadata)")
        messages = checked_messages(found[0], "init()")
        return Opening() if messages == prompt else Opening(messages=messages)

    async def step(self, text: str) -> Step:
        found = await called(self.object.step, text)
        if not isinstance(found, Mapping) or not {"observations", "reward", "done"} <= {*found}:
            raise wrong("step()", found, "return a BaseTextEnvStepOutput")
        if found.get("postprocessed_action") != text:  # what the model drew is never replaced
            refuse("step()", found, "postprocessed_action")
        observations = checked_messages(found["observations"], "step()", roles=("user", "tool"))
        reward = number(found["reward"], "the reward of step()")
        return Step(observations, reward, truth(found["done"], "done of step()"))

    async def close(self) -> None:
        if hasattr(self.object, "close"):
            await called(self.object.close)


class OpenRLHFSession(Session):
    """An AgentInstance of OpenRLHF: async `reset(states)` and `step(states)`, which speak in dicts. Its feedback is
    appended as it is, without a chat template."""

    def __init__(self, make: Callable[..., Any]):
        self.make = make

    async def begin(self, start: Start) -> Opening:
        self.object = await made(self.make)
        label = start.columns.get("label", start.columns.get("labels"))
        self.states = start.values | {"label": label}
        found = await called(self.object.reset, self.states | {"prompt": start.prompt, "observation": start.prompt})
        if not isinstance(found, Mapping) or not isinstance(found.get("observation"), str):
            raise wrong("reset()", found, "return a dict with an observation, which is text")
        self.text = found["observation"]
        return Opening() if self.text == start.prompt else Opening(text=self.text)

    async def step(self, text: str) -> Step:
        states = self.states | {"observation_text": self.text, "action_text": text, "sampling_params": None}
        found = await called(self.object.step, states)
        if not isinstance(found, Mapping) or not {"rewards", "environment_feedback", "done"} <= {*found}:
            raise wrong("step()", found, "return a dict with rewards, environment_feedback and done")
        refuse("step()", found, "sampling_params", "images", "environment_images")
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
        """Returns an object of the class."""
        schema = self.schema
        if schema is not None:
            with suppress(ImportError):  # a class that does not need it
                from verl.tools.schemas import OpenAIFunctionToolSchema

                schema = OpenAIFunctionToolSchema.model_validate(schema)
        return self.cls(**taken_by(self.cls, {"config": self.config, "tool_schema": schema}))

    def described(self) -> dict[str, Any]:
        """Returns the schema of the tool. Raises UserError."""
        schema: Any = self.schema
        if schema is None:
            try:
                schema = self.made().get_openai_tool_schema()
            except Exception as error:  # whatever its class raises without a schema
                why = f"{type(error).__name__}: {error}"
                fix = "name a file of tools (.yaml) with its tool_schema, as verl's tool_config_path does"
                raise UserError(f"{self.cls.__name__} does not describe itself ({why}): {fix}") from None
        if hasattr(schema, "model_dump"):
            schema = schema.model_dump(exclude_unset=True, exclude_none=True)
        if not isinstance(schema, dict) or not isinstance((schema.get("function") or {}).get("name"), str):
            raise UserError(f"the tool_schema of {self.cls.__name__} has no function with a name")
        return schema


class VerlSession(Session):
    """BaseTools of verl: async `create`, `execute`, `calc_reward`, `release`. An instance of each lives as long as the
    episode. The column tools_kwargs gives what each is created with."""

    def __init__(self, tools: Mapping[str, VerlTool]):
        self.tools = tools

    async def begin(self, start: Start) -> Opening:
        self.objects = {name: tool.made() for name, tool in self.tools.items()}
        self.ids: dict[str, str] = {}
        created_with = start.columns.get("tools_kwargs") or {}
        for name, tool in self.objects.items():
            kwargs = (created_with.get(name) or {}).get("create_kwargs") or {}
            known = {"seed": start.seed, "sample_seed": start.sample_seed, "create_kwargs": kwargs} | kwargs
            found = await called(tool.create, **taken_by(tool.create, known))
            self.ids[name] = found[0] if isinstance(found, tuple) else found
        return Opening()

    async def call(self, name: str, arguments: dict[str, Any]) -> Step:
        if name not in self.objects:
            return no_tool(name, self.objects)
        try:
            found = await called(self.objects[name].execute, self.ids[name], arguments)
        except BaseException as error:
            return failed(error)
        what = f"execute() of {name}"
        if not isinstance(found, tuple) or len(found) != 3:
            raise wrong(what, found, "return (response, reward, metrics)")
        response, reward, metrics = found
        refuse(what, response, "image", "video")
        text = text_of(getattr(response, "text", response), what)
        logs = {key: float(value) for key, value in (metrics or {}).items() if isinstance(value, numbers.Real)}
        return Step(text, number(reward or 0.0, f"the reward of {what}"), logs=logs)

    async def reward(self) -> float:
        total = 0.0
        for name, tool in self.objects.items():
            if hasattr(tool, "calc_reward"):
                total += number(await called(tool.calc_reward, self.ids[name]) or 0.0, f"calc_reward() of {name}")
        return total

    async def close(self) -> None:
        for name, tool in self.objects.items():
            if hasattr(tool, "release"):
                await called(tool.release, self.ids[name])


class Settings(dict):
    """An empty config, whose values may be read as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the config of the environment has no {name!r}") from None


def verl_tools(path: str) -> list[VerlTool]:
    """Returns the tools of a file in verl's form (multi_turn.tool_config_path). Raises UserError."""
    from rlhf_spmd.config.file import yaml_value

    try:
        values = yaml_value(read_bytes(path).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"it can't be read: {error}") from None
    entries = values.get("tools") if isinstance(values, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UserError("it has no list `tools`: write class_name, config and tool_schema of each")
    return [_verl_tool(entry, Path(path).parent) for entry in entries]


def _verl_tool(entry: Any, folder: Path) -> VerlTool:
    """Returns the tool of an entry. Raises UserError. folder: where modules may be."""
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
        raise UserError(f"an entry of `tools` has no class_name: {str(entry)[:80]}")
    config = entry.get("config") or {}
    if config.get("type", "native") != "native":
        raise UserError(f"{entry['class_name']} has the type {config['type']!r}: only native ones are supported")
    target, _, name = entry["class_name"].rpartition(".")
    beside = folder / f"{target}.py"
    module, name = load_named(f"{beside if beside.is_file() else target}:{name}", "Name", "environment")
    cls: Any = getattr(module, name, None)
    if not has_methods(cls, "create", "execute"):
        raise UserError(f"{entry['class_name']} is not a class with create() and execute()")
    return VerlTool(cls, config, entry.get("tool_schema"))


def has_methods(cls: Any, *names: str) -> bool:
    """Returns whether something is a class with these methods."""
    return inspect.isclass(cls) and all(callable(getattr(cls, name, None)) for name in names)


def tools_by_name(tools: Sequence[VerlTool]) -> dict[str, VerlTool]:
    """Returns tools by the names in their schemas. Raises UserError if several have the same."""
    named = {tool.described()["function"]["name"]: tool for tool in tools}
    if len(named) < len(tools):
        raise UserError(f"several tools have the same name ({', '.join(named)}): rename one")
    return named
