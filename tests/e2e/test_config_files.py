"""A run from a file of --config, and the run that its own config.json starts again: the same tokens and losses."""

import json
import shutil
from pathlib import Path

import pytest

from tests.folders import write_all
from tests.page_runs import timeless

STRATEGY = Path(__file__).parents[2] / "strategies" / "flattening.py"


@pytest.fixture(scope="module")
def first(tmp_path_factory, warm) -> tuple[Path, str]:
    """Returns folder of a run with a strategy of the user's, and its standard output."""
    folder = tmp_path_factory.mktemp("config")
    options = dict(word.split("=", 1) for word in write_all(folder) if not word.startswith("ppo."))
    del options["optimizer.critic_lr"]
    shutil.copyfile(STRATEGY, folder / "mine.py")
    lines = [f"{key}: {value}" for key, value in options.items()]
    lines += [f"runs: {folder / 'runs'}", "name: first", "algorithm: rloo", "rollout_batch: 6"]
    lines += ["strategy:", f"  name: {folder / 'mine.py'}", "  zero: 1", "samples_per_prompt: 4", "preset: tiny"]
    (folder / "run.yaml").write_text("\n".join(line for line in lines if line != "rollout_batch: 24"), encoding="utf-8")
    status, stdout, stderr = warm.run(["train", "--config", folder / "run.yaml", "iterations=2"])
    assert status == 0, stderr
    return folder / "runs" / "first", stdout


def test_the_stored_configuration_gives_the_same_run(first, warm):
    run, _ = first
    words = ["--config", run / "config.json", "--runs", run.parent, "--name", "again"]
    status, stdout, stderr = warm.run(["train", *words])
    assert status == 0, stderr
    assert timeless(run.parent / "again") == timeless(run)
    stored = [
        json.loads((run.parent / name / "config.json").read_text(encoding="utf-8")) for name in ("first", "again")
    ]
    stored[1]["strategy"]["name"] = stored[0]["strategy"]["name"]  # each names its own copy
    assert stored[0] == stored[1]
