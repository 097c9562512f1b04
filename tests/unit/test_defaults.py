"""What a run does that says nothing: the rules of PPO (the rows of CONTRIBUTING.md) as they stand in the config.

That a run obeys these options, whatever their values, is shown in test_slow_twin.py and test_invariants.py.
"""

import dataclasses
import inspect

import pytest

from rlhf_spmd.algorithms import ppo_math
from rlhf_spmd.algorithms.ppo import PPO
from rlhf_spmd.config import Config, Generation, Optimizer
from rlhf_spmd.presets import PRESETS, load
from rlhf_spmd.runtime.execute.optimizer_step import PARITY_TOLERANCE

RULES = {  # row -> option: its default
    1: {"ppo.kl_coef": 0.05},
    2: {"ppo.kl_controller": "fixed", "ppo.kl_target": 6.0, "ppo.kl_horizon": 10_000},
    4: {"ppo.truncation": "penalty", "ppo.truncation_penalty": -1.0},
    5: {"ppo.clip_score": None, "ppo.normalize_scores": False},
    6: {"ppo.gamma": 1.0, "ppo.lam": 0.95},
    8: {"ppo.whiten": "mini_batch"},
    9: {"ppo.clip_ratio": 0.2},
    10: {"ppo.clip_value": 0.2},
    12: {"ppo.old_logprobs": "generator"},
    13: {"generation.temperature": 1.0},
    14: {"generation.top_k": 0, "generation.top_p": 1.0, "generation.min_p": 0.0, "generation.min_new_tokens": 0},
    16: {"ppo.epochs": 4},
    19: {"ppo.kl_early_stop": None},
    20: {
        "optimizer.actor_lr": 1e-6,
        "optimizer.critic_lr": 5e-6,
        "optimizer.warmup_steps": 0,
        "optimizer.schedule": "constant",
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.95,
        "optimizer.eps": 1e-5,
        "optimizer.weight_decay": 0.0,
        "optimizer.max_grad_norm": 1.0,
    },
}
NO_RULE = {"generation.stop": (), "ppo.entropy_coef": 0.0}  # off
TABLE = NO_RULE | {option: default for row in RULES.values() for option, default in row.items()}
# What a preset's idea asks for; it may not move any other option of the table.
ITS_OWN = {"ppo.epochs", "ppo.kl_coef", "ppo.truncation", "optimizer.actor_lr", "optimizer.critic_lr"}


def options_of(ppo: PPO, optimizer: Optimizer, generation: Generation) -> dict:
    groups = {"ppo": ppo, "optimizer": optimizer, "generation": generation}
    return {
        f"{name}.{key}": value for name, group in groups.items() for key, value in dataclasses.asdict(group).items()
    }


def test_defaults_are_the_rules():
    """All options of PPO and the optimizer; a new one needs a line here."""
    found = options_of(PPO(), Optimizer(), Generation())
    assert found.pop("generation.max_new_tokens") > 0  # no rule
    for name in ("max_sequences", "block_size", "cache_fraction"):  # they change no number
        found.pop(f"generation.{name}")
    assert found == TABLE
    config = Config(preset="none")
    assert (config.ppo, config.optimizer, config.generation) == (PPO(), Optimizer(), Generation())


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_keep_them(preset):
    config = load(preset)
    found = options_of(config.ppo, config.optimizer, config.generation)
    assert {key for key, default in TABLE.items() if found[key] != default} <= ITS_OWN
    assert config.parity_tolerance is None


def test_the_math_has_the_same_defaults():
    """And the numbers that are no options: the clip's 0.2 of the KL controller is in test_ppo_math.py."""
    names = {
        ppo_math.next_kl_coef: {"target": "kl_target", "horizon": "kl_horizon"},
        ppo_math.shaped_scores: {name: name for name in ("truncation", "truncation_penalty", "clip_score")},
        ppo_math.gae: {"gamma": "gamma", "lam": "lam"},
        ppo_math.policy_loss_sum: {"clip_ratio": "clip_ratio"},
        ppo_math.value_loss_sum: {"clip_value": "clip_value"},
    }
    for function, parameters in names.items():
        for name, option in parameters.items():
            default = inspect.signature(function).parameters[name].default
            assert default == TABLE[f"ppo.{option}"], f"{function.__name__}({name})"
    assert inspect.signature(ppo_math.value_loss_sum).parameters["value_coef"].default == 0.5
    assert ppo_math.WHITEN_EPS == 1e-8
    assert PARITY_TOLERANCE == {"float32": 1e-4, "bfloat16": 2.0}
