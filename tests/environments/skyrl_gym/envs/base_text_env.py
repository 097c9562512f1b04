"""The names that environments of SkyRL-Gym import."""

from typing import Any, TypedDict


class BaseTextEnvStepOutput(TypedDict):
    observations: list[dict[str, str]]
    reward: float
    done: bool
    metadata: dict[str, Any]
    postprocessed_action: str | None


class BaseTextEnv:
    def __init__(self):
        self.turns = 0
        self.max_turns = 1

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        raise NotImplementedError

    def close(self):
        pass
