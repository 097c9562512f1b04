"""GRPO, RLOO, ReMax, REINFORCE++ and the corrections of PPO trained as a user would: the same numbers on any ranks, and
under any strategy."""

import json
import shutil

import pytest

from tests.folders import WORDS, write_model
from tests.page_runs import REALLOCATION, assert_same, metrics, resume, timeless, trained, weights

SEPARATION = ("--strategy", "separation")
DAPO = ("grpo.drop_equal_groups=true", "grpo.clip_high=0.28", "grpo.overlong=shape", "grpo.overlong_buffer=4")
CORRECTED = ("old_logprobs=recompute", "importance_weights=token", "rejection=sequence")
CASES = {  # page, options, ranks, placement
    "grpo on 3": ("grpo", ("grpo.kl_coef=0.04",), 3, ()),
    "grpo, separation": ("grpo", DAPO, 4, SEPARATION),
    "grpo, tp and pp": ("grpo", DAPO, 4, REALLOCATION),
    "grpo, oversampling": ("grpo", (*DAPO, "grpo.oversampling=2"), 4, SEPARATION),
    "grpo, oversampling on 3": ("grpo", (*DAPO, "grpo.oversampling=4", "grpo.min_groups=1"), 3, ()),
    "grpo, rounds": ("grpo", (*DAPO, "grpo.rounds=3"), 4, SEPARATION),
    "grpo, batch scale": ("grpo", ("grpo.scale=batch", "grpo.drop_equal_groups=true"), 3, ()),
    "grpo, corrections": ("grpo", tuple(f"grpo.{word}" for word in CORRECTED), 4, SEPARATION),
    "ppo, corrections": ("ppo", tuple(f"ppo.{word}" for word in CORRECTED), 4, SEPARATION),
    "rloo, corrections": ("rloo", tuple(f"rloo.{word}" for word in CORRECTED), 3, ()),
    "reinforce++, corrections": (
        "reinforce_plus_plus",
        tuple(f"reinforce_plus_plus.{word}" for word in CORRECTED),
        3,
        (),
    ),
    "gspo": ("grpo", ("grpo.ratio_level=sequence", "grpo.aggregation=seq-mean-token-mean"), 3, ()),
    "rloo": ("rloo", (), 4, SEPARATION),
    "rloo on 3": ("rloo", (), 3, ()),
    "remax": ("remax", (), 4, REALLOCATION),
    "remax on 3": ("remax", (), 3, ()),
    "reinforce++": ("reinforce_plus_plus", (), 4, REALLOCATION),
    "reinforce++ with baseline": ("reinforce_plus_plus", ("reinforce_plus_plus.baseline=group",), 3, ()),
}
FAST = ("remax on 3",)
REWARD = """
def few(prompts, responses):
    return [float(len(response.split()) > 4) + 0.5 * float("ba" in response) for response in responses]


def many(prompts, responses):
    return [sum(map(ord, response)) % 97 / 50 - 1 for response in responses]
"""


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    """Returns a model, prompts, and reward functions: one with few values, so that some groups have equal rewards."""
    folder = tmp_path_factory.mktemp("models")
    rows = [
        {"prompt": " ".join(WORDS[(7 * index + place) % 60] for place in range(1 + index % 5))} for index in range(24)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    write_model(folder / "lm", seed=1)
    data = [f"data.prompts={folder / 'rows.jsonl'}", "data.max_prompt=8", "generation.max_new_tokens=10"]
    sizes = ["rollout_batch=8", "samples_per_prompt=3", "mini_batch=12", "micro_batch=3", "iterations=2"]
    words = [
        *data,
        *sizes,
        "deadline_s=100",
        "optimizer.actor_lr=1e-3",
        "optimizer.eps=1e-5",  # at 1e-8 a step amplifies what rounding leaves of gradients near zero
        f"reward_function={folder / 'reward.py'}:many",
    ]
    return [*words, "--model", str(folder / "lm")]


def of_case(name: str, options: list[str]) -> list[str]:
    page, more, _, _ = CASES[name]
    drops = "grpo.drop_equal_groups=true" in more
    words = [word.replace(":many", ":few") if drops else word for word in options]
    return ["--algorithm", page, *words, f"{page}.epochs=2", *more]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in CASES])
def test_the_same_numbers_anywhere(name, options, tmp_path):
    _, _, num_ranks, placement = CASES[name]
    one = trained(of_case(name, options), 1, tmp_path / "one")
    rows = metrics(one)
    assert len(rows) == 2 and rows[0] != rows[1] and rows[0]["actor_grad_norm"] > 0
    if "grpo.drop_equal_groups=true" in of_case(name, options):
        assert 0 < rows[0]["used"] < 1
    if "grpo.oversampling=2" in of_case(name, options):  # 2 of the 4 groups of a mini-batch, unless too few are left
        assert all(0 < row["trained_groups"] <= 2 for row in rows)
        assert all((row["short_steps"] > 0) == (row["trained_groups"] < 2) for row in rows)
    assert_same(trained([*of_case(name, options), *placement], num_ranks, tmp_path / "placed"), one, name)


def test_columns_and_weighted_functions(options, tmp_path):
    """On two ranks, each row's column belongs to its prompt; the weighted sum and each function are logged."""
    source = """
def of_column(prompts, responses, first):
    return [1.0 if prompt.split()[0] == word else -9.0 for prompt, word in zip(prompts, first)]

def length(completions, **columns):
    return [None if not text else len(text.split()) for text in completions]
"""
    (tmp_path / "two.py").write_text(source, encoding="utf-8")
    rows = [{"prompt": f"{word} {WORDS[place]}", "first": word} for place, word in enumerate(reversed(WORDS))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    functions = f"reward_function={tmp_path / 'two.py'}:of_column,{tmp_path / 'two.py'}:length"
    words = [*of_case("grpo on 3", options), f"data.prompts={tmp_path / 'rows.jsonl'}", functions]
    row = metrics(trained([*words, "reward_weights=1,0.5", "iterations=1"], 2, tmp_path / "run"))[0]
    assert row["score_of_column"] == 1.0 and row["score_of_column_std"] == 0.0
    assert row["score"] == pytest.approx(1.0 + 0.5 * row["score_length"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_resume_draws_the_same_prompts(ahead, options, tmp_path):
    """To the bit on as many ranks, with the same tokens on others; a batch in flight keeps the prompts it was given."""
    placement = (*SEPARATION, f"strategy.ahead={ahead}", "iterations=3", "checkpoint.every=1", "checkpoint.keep=3")
    whole = trained([*of_case("grpo, rounds", options), *placement], 2, tmp_path / "whole")
    used = [row["prompts_used"] for row in metrics(whole)]
    assert used[0] > 8 and used[2] > used[1] > used[0]
    for num_ranks in (2, 4):
        half = shutil.copytree(whole, tmp_path / f"half {num_ranks}")
        for number in (2, 3):
            shutil.rmtree(half / "checkpoints" / f"iteration-{number:06d}")
        resume(half, num_ranks)
        assert [row["tokens_sha256"] for row in metrics(half)] == [row["tokens_sha256"] for row in metrics(whole)]
        assert [row["prompts_used"] for row in metrics(half)] == used
        assert num_ranks > 2 or (timeless(whole) == timeless(half) and weights(whole) == weights(half))
