"""Every option can be set by a word of the command line, and the word changes nothing else; the largest sizes."""

from typing import get_args

import pytest

from rlhf_spmd.config import presets
from rlhf_spmd.config.options import options_of
from rlhf_spmd.config.presets import load
from tests.unit.config.test_presets import bare, refused, value_of

NEEDED = {  # options that make no sense without others
    **dict.fromkeys(("ppo.importance_weights", "ppo.rejection"), ["ppo.old_logprobs=recompute"]),
    "ppo.rejection_range": ["ppo.old_logprobs=recompute", "ppo.rejection=token"],
    **dict.fromkeys(("reward_weights", "reward_workers"), ["reward_function=m:f"]),
    "reward_timeout_s": ["reward_function=m:f", "reward_workers=2"],
    **dict.fromkeys(("generation.top_p", "generation.min_p"), ["generation.top_k=8"]),
    "checkpoint.best": ["eval.prompts=x"],
    "rollouts.format": ["rollouts.every=1"],
    "eval.samples_per_prompt": ["eval.prompts=x", "eval.temperature=1"],
}
EVALUATED = ["eval.prompts=x", "checkpoint.best=mean@1"]
PAGES = {"mini_batch_tokens": "sft"}  # of options that do not go with PPO
VALUES = {"ppo.rejection_range": "0.5,2", "checkpoint.best": "pass@1", "data.chat_template_kwargs": '{"a": 1}'}


def test_every_key_can_be_overridden():
    """And only that key changes."""
    samples = {int: "8", float: "0.5", bool: "true", str: "x"}
    for key in presets.all_keys():
        if key in ("preset", "strategy", "shape", "rollout_batch", "mini_batch", "samples_per_prompt"):
            continue
        if key == "eval.precomputed_logprobs":  # alone it is refused (test_precompute.py)
            continue
        page = PAGES.get(key)
        usual = load("tiny", algorithm=page)
        hint = bare(options_of(usual)[key][0])
        choices = [bare(choice) for choice in get_args(hint)]
        others = [c for c in choices if isinstance(c, str) and c != value_of(usual, key)]
        kind = next((t for t in (*choices, hint) if t in samples), None)
        other = str(not value_of(usual, key)) if kind is bool else samples.get(kind)
        text = VALUES.get(key) or (others[0] if others else other)
        needs = NEEDED.get(key, EVALUATED if key.startswith("eval.") and key != "eval.prompts" else [])
        base, changed = (load("tiny", [*needs, *more], algorithm=page) for more in ([], [f"{key}={text}"]))
        assert value_of(changed, key) != value_of(base, key), key
        assert sum(value_of(changed, other) != value_of(base, other) for other in options_of(base)) == 1, key


@pytest.mark.parametrize(
    "sizes",
    [
        ["samples_per_prompt=10000000000"],
        ["rollout_batch=3200000000"],
        ["rollout_batch=3200000000", "mini_batch=3200000000"],
        ["ppo.epochs=1000000"],
    ],
)
def test_an_iteration_has_a_largest_size(sizes):
    """`check` would go through each optimizer step, and every rank holds the order of all rows."""
    text = refused(*sizes)
    assert "too many for one iteration, of at most 1,048,576 and 10,000; lower rollout_batch" in text, text


def test_a_value_of_any_length_makes_a_short_message():
    message = refused("seed=" + "9" * 100_000)
    assert len(message) < 600 and message.startswith("seed=999") and "(100,005 characters)" in message
