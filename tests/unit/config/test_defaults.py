"""What a run does that says nothing: the rules of PPO (the rows of docs/ppo_rules.md) as they stand in the config.

That a run obeys these options, whatever their values, is shown in test_slow_twin.py and test_invariants.py.
"""

import inspect

import pytest
import torch

from rlhf_spmd.algorithms.ppo import Options
from rlhf_spmd.config.options import Config, Generation, Optimizer
from rlhf_spmd.config.presets import PRESETS, load
from rlhf_spmd.pages.algorithm import algorithm_names
from rlhf_spmd.pages.option_tree import options_of as config_options

RULES = {  # row -> option: its default
    1: {"ppo.kl_coef": 0.05},
    2: {"ppo.kl_controller": "fixed", "ppo.kl_target": 6.0, "ppo.kl_horizon": 10_000},
    4: {"ppo.truncation": "penalty", "ppo.truncation_penalty": -1.0},
    5: {"ppo.clip_score": None, "ppo.normalize_scores": False, "ppo.normalize_values": False},
    6: {"ppo.gamma": 1.0, "ppo.lam": 0.95},
    8: {"ppo.whiten": "mini_batch"},
    9: {"ppo.clip_ratio": 0.2},
    10: {"ppo.clip_value": 0.2},
    12: {
        "ppo.old_logprobs": "generator",
        "ppo.importance_weights": "none",
        "ppo.importance_cap": 2.0,
        "ppo.generator_clip": False,
        "ppo.rejection": "none",
        "ppo.rejection_range": None,
    },
    13: {"generation.temperature": 1.0},
    14: {"generation.top_k": 0, "generation.top_p": 1.0, "generation.min_p": 0.0, "generation.min_new_tokens": 0},
    16: {"ppo.epochs": 4},
    19: {"ppo.kl_early_stop": None, "ppo.ratio_early_stop": None},
    20: {
        "optimizer.actor_lr": 1e-6,
        "optimizer.critic_lr": 5e-6,
        "optimizer.warmup_steps": 0,
        "optimizer.warmup_ratio": 0.0,
        "optimizer.schedule": "constant",
        "optimizer.min_lr_ratio": 0.0,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.999,
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.0,
        "optimizer.weight_decay_on": "all",
        "optimizer.max_grad_norm": 1.0,
    },
}
NO_RULE = {"generation.stop": (), "ppo.entropy_coef": 0.0, "optimizer.sum_each_pass": True}  # off; no number
TABLE = NO_RULE | {option: default for row in RULES.values() for option, default in row.items()}
# What a preset's idea asks for; it may not move any other option of the table.
ITS_OWN = {
    "ppo.old_logprobs",
    "ppo.epochs",
    "ppo.kl_coef",
    "ppo.truncation",
    "optimizer.actor_lr",
    "optimizer.critic_lr",
    "optimizer.beta2",
    "optimizer.eps",
}


def options_of(config: Config) -> dict:
    """Returns every option of these groups."""
    groups = ("ppo", "optimizer", "generation")
    return {key: one.value for key, one in config_options(config).items() if key.partition(".")[0] in groups}


def test_defaults_are_the_rules():
    """All options of PPO and the optimizer; a new one needs a line here."""
    config = Config(preset="none")
    found = options_of(config)
    assert found.pop("generation.max_new_tokens") > 0  # no rule
    for name in ("max_sequences", "block_size", "cache_fraction"):  # they change no number
        found.pop(f"generation.{name}")
    assert found == TABLE
    assert (config.options, config.generation) == (Options(), Generation())
    assert config.optimizer == Optimizer(lr={"actor": 1e-6, "critic": 5e-6})


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_keep_them(preset):
    config = load(preset, algorithm="ppo")
    found = options_of(config)
    assert {key for key, default in TABLE.items() if found[key] != default} <= ITS_OWN
    assert config.parity_tolerance is None


@pytest.mark.parametrize("algorithm", algorithm_names())
def test_a_model_from_a_folder_has_the_adamw_of_torch_and_the_presets_keep_theirs(algorithm):
    """At 1.5 billion weights an eps of 1e-5 halves the steps that TRL makes at the same learning rate."""
    usual = {name: one.default for name, one in inspect.signature(torch.optim.AdamW).parameters.items()}
    for preset in ("model", "llama-7b"):
        ours = load(preset, algorithm=algorithm).optimizer
        assert (ours.beta1, ours.beta2, ours.eps) == (*usual["betas"], usual["eps"])
        assert ours.weight_decay == 0.0, "as in TRL; torch has 0.01"
    for preset in ("tiny", "smollm2", *(("arithmetic", "tools") if algorithm == "grpo" else ())):
        ours = load(preset, algorithm=algorithm).optimizer
        assert (ours.beta1, ours.beta2, ours.eps) == (0.9, 0.95, 1e-5)
