"""The names that agents of OpenRLHF import."""

from abc import ABC, abstractmethod


class AgentInstanceBase(ABC):
    @abstractmethod
    async def step(self, state_dict: dict, **kwargs): ...

    async def reset(self, states: dict, **kwargs):
        return states


class MultiTurnAgentExecutor:
    def __init__(self, agent):
        self.agent = agent

    async def execute(self, prompt, label, sampling_params): ...
