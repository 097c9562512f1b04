"""Pages trained with adapters: each on one rank in this process, and stages that hand their adapters on, on ranks."""

import json

import pytest

from rlhf_spmd.config import presets
from tests.folders import given_rows, write_model
from tests.runs import RunOf

SIZES = ("rollout_batch=8", "mini_batch=4", "micro_batch=4", "iterations=2", "data.max_prompt=8")
GROUPS = ("rollout_batch=4", "samples_per_prompt=2")
REWARD = """
def many(prompts, responses):
    return [sum(map(ord, response)) % 97 / 50 - 1 for response in responses]
"""
PAGES = {"sft": (), "dpo": (), "reward_model": (), "distill": ("models.teacher={teacher}",)}
PAGES |= {"grpo": (*GROUPS, "grpo.kl_coef=0.01"), "rloo": GROUPS, "remax": (), "reinforce_plus_plus": GROUPS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns models, and rows with the columns of all pages."""
    folder, rows = tmp_path_factory.mktemp("adapted"), given_rows(24)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    write_model(folder / "lm", seed=1)
    write_model(folder / "teacher", seed=2)
    return folder


def words_of(page, folder, *more):
    data = [f"data.prompts={folder / 'rows.jsonl'}", "generation.max_new_tokens=10", *SIZES]
    own = [word.format(teacher=folder / "teacher") for word in PAGES[page]]
    judged = page in ("grpo", "rloo", "remax", "reinforce_plus_plus")
    return [*data, *own, *([f"reward_function={folder / 'reward.py'}:many"] if judged else []), *more]


SLOW = ("sft", "dpo", "rloo", "reinforce_plus_plus")  # tests/mpi/test_given_responses.py has adapters of the first two


@pytest.mark.parametrize("page", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in PAGES])
def test_a_page_trains_adapters_alone(page, folder):
    words = words_of(page, folder, "lora.rank=2")
    run = RunOf(presets.load(None, words, str(folder / "lm"), algorithm=page))
    ((role, engine),) = run.job.models.engines.items()
    trained_names = engine.model.trained_names()
    before = {name: one.detach().clone() for name, one in engine.model.named_parameters()}
    run.iterations()
    changed = {name for name, one in engine.model.named_parameters() if not one.equal(before[name])}
    assert changed <= trained_names and any(name.endswith("lora_B") for name in changed), role
