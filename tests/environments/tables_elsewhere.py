"""The environment of the preset `tools`, written as other programs want it: the same words come back in each."""

import functools
import json
from typing import Any

from openrlhf.utils.agent import AgentInstanceBase
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

from rlhf_spmd.embedded.table_tools import Table


def answered(table: dict[str, int], text: str) -> str | None:
    """Returns what comes back to a text with a call; None: it has none."""
    before, mark, call = text.partition("<tool_call>")
    if not mark:
        return None
    call, own = json.loads(call.partition("</tool_call>")[0]), Table()
    own.reset(table)
    return getattr(own, call["name"])(**call["arguments"])


class OfSkyRL(BaseTextEnv):
    def __init__(self, env_config: dict, extras: dict[str, Any]):
        super().__init__()
        self.table = extras["table"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        back = answered(self.table, action)
        observations = [] if back is None else [{"role": "tool", "content": back}]
        return BaseTextEnvStepOutput(observations=observations, reward=0.0, done=back is None, metadata={})


class OfOpenRLHF(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.num_steps = 0

    async def reset(self, states: dict, **kwargs):
        self.table = states["table"]
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        back = answered(self.table, states["action_text"])
        feedback = "" if back is None else f"<|tool|>{back}<|end|><|assistant|>"
        return {"rewards": 0.0, "scores": 0.0, "environment_feedback": feedback, "done": back is None}


class TableTool(BaseTool):
    """A method of the table as a tool of verl."""

    method = ""

    async def create(self, instance_id: str | None = None, create_kwargs: dict | None = None, **kwargs):
        self.own = Table()
        self.own.reset((create_kwargs or {}).get("table", {}))
        return await super().create(instance_id)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        return ToolResponse(text=getattr(self.own, self.method)(**parameters)), 0.0, {}


class Lookup(TableTool):
    method = "lookup"


class Calculate(TableTool):
    method = "calculate"


class OfTRL(Table):
    """Made by a factory, as `environment_factory` allows."""

    def __init__(self, name: str):
        self.name = name


FACTORIES = {"table": functools.partial(OfTRL, "table")}
