"""Pages trained with adapters: each on one rank in this process, and stages that hand their adapters on, on ranks."""

import json

import pytest

from rlhf_spmd.config import presets
from rlhf_spmd.model.adapters.uniform import is_adapter
from tests.folders import WORDS, write_model
from tests.page_runs import metrics, resume, trained
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
    folder, rows = tmp_path_factory.mktemp("adapted"), []
    for index in range(24):
        words = [WORDS[(7 * index + 3 * place) % len(WORDS)] for place in range(12)]
        row = {"prompt": words[: 1 + index % 5], "completion": words[3 : 5 + index % 6]}
        row |= {"chosen": words[2 : 4 + index % 4], "rejected": words[5 : 7 + index % 5]}
        rows.append({name: " ".join(some) for name, some in row.items()})
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


@pytest.mark.parametrize("page", PAGES)
def test_a_page_trains_adapters_alone(page, folder):
    words = words_of(page, folder, "lora.rank=2")
    run = RunOf(presets.load(None, words, str(folder / "lm"), algorithm=page))
    ((role, engine),) = run.job.models.engines.items()
    trained_names = engine.model.trained_names()
    before = {name: one.detach().clone() for name, one in engine.model.named_parameters()}
    run.iterations()
    changed = {name for name, one in engine.model.named_parameters() if not one.equal(before[name])}
    assert changed <= trained_names and any(name.endswith("lora_B") for name in changed), role


@pytest.mark.slow
def test_stages_hand_their_adapters_on(folder, warm, tmp_path):
    """Supervised fine-tuning and a reward model on two ranks, then PPO and best-of from both, in other layouts too."""
    model = ["--model", str(folder / "lm")]
    sft, judge = (
        trained(["--algorithm", page, *model, *words_of(page, folder, "lora.rank=2")], 2, tmp_path / page)
        for page in ("sft", "reward_model")
    )
    assert is_adapter(sft / "actor") and is_adapter(judge / "reward")
    data = [f"data.prompts={folder / 'rows.jsonl'}", "generation.max_new_tokens=4", *SIZES, "checkpoint.every=1"]
    start = ["--algorithm", "ppo", "--model", str(sft / "actor"), *data, f"models.reward={judge / 'reward'}"]
    one = trained(start, 1, tmp_path / "one")
    two = trained([*start, "strategy.tp=2"], 2, tmp_path / "two")
    four = trained([*start, "--strategy", "separation"], 4, tmp_path / "four")
    hashes = [row["tokens_sha256"] for row in metrics(one)]
    assert [[row["tokens_sha256"] for row in metrics(run)] for run in (two, four)] == [hashes, hashes]
    resume(two, 2, "iterations=3")
    assert len(metrics(two)) == 3 and is_adapter(two / "actor")
    out = tmp_path / "answers.jsonl"
    words = ["generate", "--model", two / "actor", "--prompts", folder / "rows.jsonl", "--out", out]
    words += [f"best_of={judge / 'reward'}", "samples_per_prompt=2", "generation.max_new_tokens=4"]
    status, stdout, stderr = warm.run(words, 2)
    assert status == 0 and len(out.read_text(encoding="utf-8").splitlines()) == 24, stdout + stderr
