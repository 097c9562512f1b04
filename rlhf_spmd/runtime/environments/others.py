"""Environments of other programs in one episode: SkyRL-Gym, OpenRLHF and verl. TRL's are those of this program
(native.py).

What they have that is not supported is refused by its name.
"""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import read_bytes
from rlhf_spmd.pages.named_objects import load_named
from rlhf_spmd.runtime.environments.native import (
    ANSWER_ROLES,
    ObjectSession,
    Opening,
    Session,
    Start,
    Step,
    called,
    checking,
    failed,
    made,
    messages_of,
    no_tool,
    number,
    taken_by,
    text_of,
    truth,
)


class SkyRLSession(ObjectSession):
    """A BaseTextEnv of SkyRL-Gym: `init(prompt)`, `step(action)`, `close()`; made with its config, which is empty here,
    and the columns as extras."""

    async def begin(self, start: Start) -> Opening:
        self.object = await made(self.make, **taken_by(self.make, {"env_config": {}, "extras": start.values}))
        prompt = start.messages or [{"role": "user", "content": start.prompt}]
        result = await called(self.object.init, [dict(message) for message in prompt])
        with checking("init()", result, "(messages, metadata)"):
            messages = messages_of(result[0])
        return Opening() if messages == prompt else Opening(messages=messages)

    async def step(self, text: str) -> Step:
        result = await called(self.object.step, text)
        with checking("step()", result, "a BaseTextEnvStepOutput, without a postprocessed_action"):
            if result.get("postprocessed_action") not in (None, text):  # what the model drew is never replaced
                raise ValueError
            observations = messages_of(result["observations"], ANSWER_ROLES)
            return Step(observations, number(result["reward"]), truth(result["done"]))


class OpenRLHFSession(ObjectSession):
    """An AgentInstance of OpenRLHF: async `reset(states)` and `step(states)`, which speak in dicts. Its feedback is
    appended as it is, without a chat template."""

    async def begin(self, start: Start) -> Opening:
        self.object = await made(self.make)
        label = start.columns.get("label", start.columns.get("labels"))
        self.states = start.values | {"label": label}
        result = await called(self.object.reset, self.states | {"prompt": start.prompt, "observation": start.prompt})
        with checking("reset()", result, "a dict with an observation, which is text"):
            self.text = text_of(result["observation"])
        return Opening() if self.text == start.prompt else Opening(text=self.text)

    async def step(self, text: str) -> Step:
        states = self.states | {"observation_text": self.text, "action_text": text, "sampling_params": None}
        result = await called(self.object.step, states)
        wanted = "a dict with rewards, environment_feedback and done, without sampling_params and images"
        with checking("step()", result, wanted):
            if result.get("sampling_params") or result.get("images") or result.get("environment_images"):
                raise ValueError
            feedback = text_of(result["environment_feedback"])
            step = Step(feedback, number(result["rewards"]), truth(result["done"]))
        self.text += text + feedback
        return step


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
        try:
            schema: Any = self.made().get_openai_tool_schema() if self.schema is None else self.schema
            if hasattr(schema, "model_dump"):
                schema = schema.model_dump(exclude_unset=True, exclude_none=True)
            assert isinstance(schema["function"]["name"], str), "a function with a name"
            return schema
        except Exception as error:  # whatever its class raises without a schema
            raise UserError(
                f"{self.cls.__name__} does not describe itself ({type(error).__name__}: {error}): name a file of tools "
                "(.yaml) with its tool_schema, as verl's tool_config_path does"
            ) from None


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
            result = await called(tool.create, **taken_by(tool.create, known))
            self.ids[name] = result[0] if isinstance(result, tuple) else result
        return Opening()

    async def call(self, name: str, arguments: dict[str, Any]) -> Step:
        if name not in self.objects:
            return no_tool(name, self.objects)
        try:
            result = await called(self.objects[name].execute, self.ids[name], arguments)
        except BaseException as error:
            return failed(error)
        with checking(f"execute() of {name}", result, "(response, reward, metrics), without images and videos"):
            response, reward, _ = result
            if getattr(response, "image", None) or getattr(response, "video", None):
                raise ValueError
            return Step(text_of(getattr(response, "text", response)), number(reward or 0.0))

    async def reward(self) -> float:
        total = 0.0
        for name, tool in self.objects.items():
            if hasattr(tool, "calc_reward"):
                result = await called(tool.calc_reward, self.ids[name])
                with checking(f"calc_reward() of {name}", result, "a number"):
                    total += number(result or 0.0)
        return total

    async def close(self) -> None:
        for name, tool in self.objects.items():
            if hasattr(tool, "release"):
                await called(tool.release, self.ids[name])


def verl_tools(path: str) -> list[VerlTool]:
    """Returns the tools of a file in verl's form (multi_turn.tool_config_path). Raises UserError."""
    from rlhf_spmd.config.file import yaml_value

    try:
        values = yaml_value(read_bytes(path).decode())
        entries = [(entry["class_name"], entry.get("config") or {}, entry) for entry in values["tools"]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"it has no list `tools` ({error}): write class_name, config and tool_schema of each") from None
    tools = []
    for class_name, config, entry in entries:
        target, _, name = class_name.rpartition(".")
        beside = Path(path).parent / f"{target}.py"
        cls = load_named(f"{beside if beside.is_file() else target}:{name}", "Name")
        if config.get("type", "native") != "native" or not has_methods(cls, "create", "execute"):
            raise UserError(f"{class_name} is not a class with create() and execute(), of the type native")
        tools.append(VerlTool(cls, config, entry.get("tool_schema")))
    return tools


def has_methods(cls: Any, *names: str) -> bool:
    """Returns whether something is a class with these methods."""
    return inspect.isclass(cls) and all(callable(getattr(cls, name, None)) for name in names)
