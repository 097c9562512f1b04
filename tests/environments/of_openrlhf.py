"""As OpenRLHF takes it (--train.agent_func_path): an AgentInstance and its executor."""

from typing import Any

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        done = self.step_idx >= 1
        correct = states["label"] in states["action_text"]
        self.step_idx += 1
        feedback = "\n\nHuman: done\n</s>" if done else f"\n\nHuman: {len(states['observation_text'])}\n\nAssistant: "
        return {
            "rewards": float(correct),
            "scores": float(correct),
            "environment_feedback": feedback,
            "done": done,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"correct": float(correct)},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
