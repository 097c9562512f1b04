"""Options that contradict each other are refused together, with all their names."""

import pytest

from rlhf_spmd.config.options import Config
from rlhf_spmd.config.presets import load
from rlhf_spmd.errors import UserError
from tests.unit.config.test_presets import refused


def test_settings_that_contradict_each_other():
    text = refused("generation.min_new_tokens=30")
    assert "min_new_tokens=30" in text and "max_new_tokens=24" in text
    assert "generation.top_k" in refused("generation.top_p=0.9")
    text = refused("mini_batch=7", "reward_workers=2", "eval.every=3", "eval.prompts=", "checkpoint.best=mean@1")
    keys = {line.partition("=")[0] for line in text.split("\n")}
    assert keys == {"rollout_batch", "reward_workers", "eval.every", "checkpoint.best"}
    for temperature in ("1e-45", "9e-7"):
        text = refused(f"generation.temperature={temperature}")
        assert text.startswith(f"generation.temperature={temperature.replace('-7', '-07')}: logits are divided by it")
        assert text.endswith("give at least 1e-06")
        text = refused("eval.prompts=p.jsonl", f"eval.temperature={temperature}")
        assert text.endswith("give at least 1e-06, or 0 for the most likely token")
    assert "unknown shape 'llama-7' (did you mean 'llama-7b'?)" in refused("shape=llama-7", preset="llama-13b")


@pytest.mark.parametrize(
    ("algorithm", "more", "fix"),
    [
        ("grpo", [], "k2 or k3, or kl_unbiased=true"),
        ("reinforce_plus_plus", ["kl_in=loss"], "k2 or k3"),
    ],
)
def test_k1_in_the_loss_is_refused(algorithm, more, fix):
    """Its gradient does not depend on the reference. Multiplied by the ratio it does, and in the reward it counts."""

    def load_with(*options: str) -> Config:
        return load(None, [f"{algorithm}.{option}" for option in [*options, *more]], algorithm=algorithm)

    with pytest.raises(UserError, match=f"kl_estimator=k1 as a term of the loss has no gradient .*={fix}$"):
        load_with("kl_coef=0.1", "kl_estimator=k1")
    assert load_with("kl_coef=0", "kl_estimator=k1").options.kl_estimator == "k1"
    assert load_with("kl_coef=0.1", "kl_estimator=k2").options.kl_coef == 0.1
    more = ["kl_in=reward"] if more else ["kl_unbiased=true"]
    assert load_with("kl_coef=0.1", "kl_estimator=k1").options.kl_coef == 0.1


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "reward_model"])
def test_options_of_sampling_are_refused_where_responses_are_given(algorithm):
    """samples_per_prompt=4 trained on each row four times, a temperature divided the logits of the loss."""
    for option in ("samples_per_prompt=4", "generation.temperature=0.7", "generation.min_new_tokens=2"):
        with pytest.raises(UserError, match=f"{option}: it has no effect without an algorithm that generates"):
            load("tiny", [option], algorithm=algorithm)
    load("tiny", ["samples_per_prompt=1", "generation.temperature=1"], algorithm=algorithm)


def test_environments_that_contradict_other_options():
    """And what an environment sets."""
    for vain in (
        "episode.max_row_tokens=99",
        "episode.on_failure=drop_group",
        "episode.max_turns=2",
        "episode.timeout_s=9",
        "forecast_episodes=1,0,0,0",
    ):
        assert "it has no effect without environment=" in refused(vain)
    assert "episode.max_row_tokens=20, generation.max_new_tokens=24: the first limits" in refused(
        "environment=m:f", "episode.max_row_tokens=20"
    )
    config = load("tiny", ["environment=m:f", "episode.max_row_tokens=99"])
    assert (config.row_tokens, config.options.old_logprobs, config.only_function) == (99, "recompute", True)
    assert load("tiny", ["environment=m:f", "ppo.old_logprobs=current"]).options.old_logprobs == "current"
    for algorithm, more, words in (
        ("sft", [], "the algorithm generates no responses"),
        ("grpo", ["grpo.overlong=shape", "grpo.overlong_buffer=4"], "choose keep or mask"),
        ("grpo", ["grpo.turn_rewards=true"], "needs scale=none"),
        (
            "grpo",
            ["grpo.old_logprobs=loglinear", "grpo.rejection=token"],
            "loglinear reads the sampl",
        ),
        ("grpo", ["episode.rows=4", "reward_function=m:f"], "which its agent returns, is that of all of its rows"),
        ("grpo", ["episode.rows=4", "grpo.turn_rewards=true", "grpo.scale=none"], "does not compare whole episodes"),
        ("ppo", ["episode.rows=4"], "does not compare whole episodes"),
        ("grpo", ["episode.rows=4", "mini_batch=10"], "a mini-batch must hold whole episodes"),
    ):
        with pytest.raises(UserError, match=words):
            load(None, ["environment=m:f", "samples_per_prompt=8", *more], algorithm=algorithm)
    with pytest.raises(UserError, match="grpo.turn_rewards=true: it has no effect without environment="):
        load(None, ["samples_per_prompt=8", "grpo.turn_rewards=true", "grpo.scale=none"], algorithm="grpo")
