"""The embedded arithmetic task is what its documents claim."""

import pytest

from rlhf_spmd.config import presets
from rlhf_spmd.embedded import path_of

HELD_OUT = path_of("arithmetic/held_out.jsonl")


@pytest.mark.parametrize("algorithm", [None, "rloo", "remax", "reinforce_plus_plus", "ppo"])
def test_the_preset_is_for_grpo_and_takes_others(algorithm):
    config = presets.load("arithmetic", [], algorithm=algorithm)
    assert config.algorithm.name == (algorithm or "grpo") and config.eval.prompts == str(HELD_OUT)
    assert config.rollout_batch * config.samples_per_prompt == 512
