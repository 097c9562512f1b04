"""The embedded arithmetic task is what its documents claim."""

import json

import pytest

from rlhf_spmd.config import presets
from rlhf_spmd.embedded import path_of

ACTOR, HELD_OUT = path_of("arithmetic/actor"), path_of("arithmetic/held_out.jsonl")


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in path_of(f"arithmetic/{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_answers_are_right_and_held_out_problems_are_in_no_prompt():
    prompts, held_out = rows("prompts"), rows("held_out")
    assert (len(prompts), len(held_out)) == (2048, 200)
    for row in (*prompts, *held_out):
        first, second = row["prompt"].removesuffix("=").split("+")
        assert row["answer"] == str(int(first) + int(second)) and min(int(first), int(second)) >= 10
    known = {row["prompt"] for row in prompts}
    assert len(known | {row["prompt"] for row in held_out}) == 2248
    exchanged = ["+".join(row["prompt"].removesuffix("=").split("+")[::-1]) + "=" for row in held_out]
    assert sum(prompt in known for prompt in exchanged) == 39  # as bench/RESULTS.md says


@pytest.mark.parametrize("algorithm", [None, "rloo", "remax", "reinforce_plus_plus", "ppo"])
def test_the_preset_is_for_grpo_and_takes_others(algorithm):
    config = presets.load("arithmetic", [], algorithm=algorithm)
    assert config.algorithm.name == (algorithm or "grpo") and config.eval.prompts == str(HELD_OUT)
    assert config.rollout_batch * config.samples_per_prompt == 512
