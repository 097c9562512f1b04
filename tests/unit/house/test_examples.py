"""The files of examples/: each is understood, and its job fits one node and two."""

import json
import re
from pathlib import Path

import pytest
import yaml

from rlhf_spmd.__main__ import main

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "examples").glob("*.yaml"))
NODES = re.compile(r"^# On two nodes: (.+)$", re.MULTILINE)


def job_of(path: Path, words: dict | None = None) -> tuple[dict, str]:
    """Returns an example without the folders of its models, and the size that its model's name tells."""
    job = yaml.safe_load(path.read_text(encoding="utf-8")) | (words or {})
    job["data"] = job["data"] | {"prompts": str(ROOT / job["data"]["prompts"])}
    if "eval" in job:
        job["eval"] = job["eval"] | {"prompts": str(ROOT / job["eval"]["prompts"])}
    size = re.search(r"Qwen2\.5-[\d.]+B", job.pop("model"))[0].lower()
    if "models" in job:
        sizes = {role: re.search(r"Qwen2\.5-[\d.]+B", text)[0].lower() for role, text in job.pop("models").items()}
        job["shape"] = ",".join(f"{role}={one}" for role, one in sizes.items())
    return job, size


def checked(job: dict, size: str, folder: Path, capsys) -> dict:
    file = folder / "run.yaml"
    file.write_text(json.dumps(job), encoding="utf-8")
    status = main(["check", "--config", str(file), "--preset", size, "--device-type", "a100-80g", "--json"])
    out = capsys.readouterr().out
    assert status == 0, out
    return json.loads(out.strip().split("\n")[-1])


def test_there_are_examples():
    assert {"sft", "reward_model", "dpo", "ppo", "grpo", "dapo", "rloo", "distill", "lora"} <= {f.stem for f in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_job_fits_one_node_and_two(path, tmp_path, capsys):
    text = path.read_text(encoding="utf-8")
    assert f"--config examples/{path.name}" in text
    changes = yaml.safe_load("{" + NODES.search(text)[1] + "}")
    for words in ({}, changes):
        job, size = job_of(path, words)
        verdict = checked(job, size, tmp_path, capsys)
        assert (verdict["errors"], verdict["warnings"]) == (0, 0)
        assert verdict["layout"] == ("2x8" if words else "1x8")
