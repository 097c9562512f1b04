"""As SkyRL-Gym takes it: a BaseTextEnv with rewards for each turn."""

from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class TurnsEnv(BaseTextEnv):
    def __init__(self, env_config: dict, extras: dict[str, Any] = {}):  # noqa: B006  # as there
        super().__init__()
        assert "reward_spec" in extras, "reward_spec is required"
        self.ground_truth = extras["reward_spec"]["ground_truth"]
        self.max_turns = extras.get("max_turns", getattr(env_config, "max_turns", 3))

    def init(self, prompt):
        return [{"role": "system", "content": "Count."}, *prompt], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        reward = 1.0 if action.strip().endswith(self.ground_truth) else 0.1
        done = self.turns >= self.max_turns or reward == 1.0
        observations = [] if done else [{"role": "user", "content": f"No. {self.max_turns - self.turns} left."}]
        return BaseTextEnvStepOutput(observations=observations, reward=reward, done=done, metadata={})
