"""Every option can be set by an argument, which changes nothing else; the largest sizes."""

import functools
from typing import get_args

import pytest

from rlhf_spmd.config import presets
from rlhf_spmd.config.presets import load
from rlhf_spmd.pages.option_tree import options_of
from tests.unit.config.test_presets import bare, refused, value_of

NEEDED = {  # options that make no sense without others
    **dict.fromkeys(("ppo.importance_weights", "ppo.rejection"), ["ppo.old_logprobs=recompute"]),
    **dict.fromkeys(
        ("ppo.rejection_range", "ppo.generator_clip"), ["ppo.old_logprobs=recompute", "ppo.rejection=token"]
    ),
    **dict.fromkeys(("reward_weights", "reward_workers"), ["reward_function=m:f"]),
    "reward_timeout_s": ["reward_function=m:f", "reward_workers=2"],
    **dict.fromkeys(("generation.top_p", "generation.min_p"), ["generation.top_k=8"]),
    "checkpoint.best": ["eval.prompts=x"],
    **dict.fromkeys(("lora.alpha", "lora.targets", "lora.rslora", "lora.dropout", "lora.generate"), ["lora.rank=2"]),
    **{
        f"lora.{role}.{name}": ["lora.rank=2"]
        for role in ("actor", "critic", "reward")
        for name in ("alpha", "targets", "rslora", "dropout")
    },
    "environment": ["ppo.old_logprobs=recompute"],
    "grpo.turn_rewards": ["environment=m:f", "grpo.scale=none", "samples_per_prompt=2", "grpo.old_logprobs=recompute"],
    **dict.fromkeys(
        ("episode.max_turns", "episode.max_calls", "episode.tool_timeout_s", "episode.timeout_s", "forecast_episodes"),
        ["environment=m:f", "ppo.old_logprobs=recompute"],
    ),
    "episode.max_row_tokens": ["environment=m:f", "generation.max_new_tokens=4"],
    "episode.rows": ["environment=m:f", "grpo.old_logprobs=recompute"],
    "episode.on_failure": ["environment=m:f", "ppo.old_logprobs=recompute"],
    "rollouts.format": ["rollouts.every=1"],
    # else they change, too
    **dict.fromkeys(
        ("lora.rank", "lora.actor.rank", "lora.critic.rank"), ["optimizer.actor_lr=1e-5", "optimizer.critic_lr=1e-5"]
    ),
    "optimizer.min_lr_ratio": ["optimizer.schedule=linear"],
    **dict.fromkeys(("logging.entity", "logging.group", "logging.tags"), ["wandb=p"]),
    "eval.samples_per_prompt": ["eval.prompts=x", "eval.temperature=1"],
}
EVALUATED = ["eval.prompts=x", "checkpoint.best=mean@1"]
PAGES = {"mini_batch_tokens": "sft", "episode.rows": "grpo"}  # of options that do not go with PPO
VALUES = {
    "forecast_failed_groups": "0.25",
    "lora.targets": "q_proj",
    "ppo.rejection_range": "0.5,2",
    "checkpoint.best": "pass@1",
    "data.chat_template_kwargs": '{"a": 1}',
}
VALUES |= {f"lora.{role}.targets": "q_proj" for role in ("actor", "critic", "reward")}


def test_every_key_can_be_overridden():
    """And only that key changes."""
    loaded = functools.cache(lambda words, page: load("tiny", words, algorithm=page))
    samples = {int: "8", float: "0.5", bool: "true", str: "x"}
    for key in presets.all_keys():
        if key in ("preset", "strategy", "shape", "rollout_batch", "mini_batch", "samples_per_prompt"):
            continue
        if key == "lora.base":  # alone it is refused (test_lora.py)
            continue
        page = PAGES.get(key)
        usual = loaded((), page)
        hint = bare(options_of(usual)[key].annotation)
        choices = [bare(choice) for choice in get_args(hint)]
        others = [c for c in choices if isinstance(c, str) and c != value_of(usual, key)]
        kind = next((t for t in (*choices, hint) if t in samples), None)
        other = str(not value_of(usual, key)) if kind is bool else samples.get(kind)
        text = VALUES.get(key) or (others[0] if others else other)
        needs = NEEDED.get(key, EVALUATED if key.startswith("eval.") and key != "eval.prompts" else [])
        base, changed = loaded(tuple(needs), page), load("tiny", [*needs, f"{key}={text}"], algorithm=page)
        before, after = ({name: option.value for name, option in options_of(of).items()} for of in (base, changed))
        assert [name for name in before if after[name] != before[name]] == [key]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("itertions=3", ["'itertions'", "did you mean 'iterations'"]),
        ("ppo.kl_coeff=1", ["unknown option 'ppo.kl_coeff' (did you mean 'ppo.kl_coef'?)"]),
        ("optimiser.actor_lr=1", ["did you mean 'optimizer.actor_lr'"]),
        ("kl_coef=1", ["did you mean 'ppo.kl_coef'"]),
        ("max_prompt=1", ["did you mean 'data.max_prompt'"]),
        ("temperature=1", ["did you mean 'generation.temperature'"]),
        ("ppo.iterations=1", ["'ppo.iterations'", "did you mean 'iterations'"]),
        ("xyzzy=1", ["'xyzzy'", "known here", "iterations"]),
        ("=1", ["unknown option ''"]),
        ("ppo=3", ["'ppo' is a group of options", "ppo.kl_coef"]),
        ("models=x", ["models.actor", "models.reward"]),
        ("iterations", ["'iterations'", "KEY=VALUE"]),
        ("preset=llama-7b", ["preset=llama-7b", "--preset llama-7b"]),
    ],
)
def test_keys_that_are_none(override, words):
    text = refused(override)
    assert all(word in text for word in words), text


@pytest.mark.parametrize("sizes", [["samples_per_prompt=10000000000"], ["ppo.epochs=1000000"]])
def test_an_iteration_has_a_largest_size(sizes):
    """`check` would go through each optimizer step, and every rank holds the order of all rows."""
    assert "at most 1,048,576 sequences and 10,000 optimizer steps" in refused(*sizes)
