"""Each file of examples/ runs with a toy model and the rows beside it."""

import json
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
EMBEDDED = ROOT / "rlhf_spmd" / "embedded"
TINY = EMBEDDED / "tiny"
SMALL = ["iterations=1", "rollout_batch=4", "mini_batch=4", "micro_batch=4", "data.epochs=0", "data.max_prompt=64"]
SMALL += ["generation.max_new_tokens=48", "num_samples=1", "strategy.tp=1"]


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_toy_model_runs_through_it(path, tmp_path, monkeypatch, warm):
    monkeypatch.chdir(ROOT)  # the files name their data from here
    job = yaml.safe_load(path.read_text(encoding="utf-8"))
    models = [f"models.{role}={TINY / ('reward' if role == 'reward' else 'actor')}" for role in job.get("models", ())]
    words = SMALL + models
    words += ["samples_per_prompt=4", "mini_batch=8"] if "samples_per_prompt" in job else []
    words += ["grpo.overlong_buffer=8"] if "overlong_buffer" in job.get("grpo", {}) else []
    words += ["strategy.zero=0"] if "zero" in job["strategy"] else []  # one rank has nothing to shard
    words += ["data.max_prompt=16", "episode.max_row_tokens=112"] if "environment" in job else []
    actor = (EMBEDDED / "tools" if "environment" in job else TINY) / "actor"
    status, stdout, stderr = warm.run(
        ["train", "--config", path, "--model", actor, "--runs", tmp_path, "--json", *words]
    )
    assert status == 0, stderr
    assert json.loads(stdout.strip().split("\n")[-1])["iterations"] == 1
