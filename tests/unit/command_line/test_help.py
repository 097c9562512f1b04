"""What --help and `options` print: options of the algorithm that is named, and examples that work as they stand."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlhf_spmd.__main__ import main
from rlhf_spmd.command_line.arguments import VERBS

QUICK = (
    "check",
    "examples",
    "slurm-scripts",
    "draw",
    "options",
    "algorithms",
    "coming-from",
)  # in a second or two, without ranks


def test_examples_work_as_they_stand(tmp_path, monkeypatch, capsys):
    """`rollouts --where` named a column that there is not, and the example of `check` was refused."""
    monkeypatch.chdir(tmp_path)
    for name in QUICK:
        for example in VERBS[name]["examples"]:
            program, *words = shlex.split(example.partition(" > ")[0])
            assert program == "rlhf-spmd" and main(words) == 0, capsys.readouterr()


@pytest.mark.slow
def test_all_examples_work_one_after_another(tmp_path):
    for name, verb in VERBS.items():
        for example in verb["examples"]:
            ended = subprocess.run(["bash", "-c", example], cwd=tmp_path, capture_output=True, text=True)
            assert ended.returncode == 0, f"{name}: {example}\n{ended.stdout}{ended.stderr}"


@pytest.mark.parametrize(
    ("words", "there", "not_there"),
    [
        (["train", "--help"], ["ppo.clip_ratio=0.2", "mini_batch=32"], ["grpo."]),
        (["train", "--algorithm", "grpo", "--help"], ["grpo.clip_high=0.2", "samples_per_prompt=8"], ["ppo."]),
        (["train", "--help", "--preset", "tools"], ["grpo.clip_high=0.2"], ["ppo."]),
        (["options", "--algorithm", "dpo"], ["dpo.beta=0.1", "strategy.micro_batch=none"], ["ppo.", "strategy.ratios"]),
        (["options", "strategy.", "--strategy", "separation"], ["strategy.ratios="], ["mini_batch=32"]),
        (["options", "eval.*EVERY"], ["eval.every="], ["eval.prompts=", "checkpoint.every"]),
        (["options", "tensor-parallel", "--algorithm", "grpo"], ["strategy.tp="], ["mini_batch=32"]),
    ],
)
def test_options_are_those_of_the_algorithm_and_the_strategy(words, there, not_there, capsys):
    if "--help" in words:
        with pytest.raises(SystemExit):
            main(words)
    else:
        assert main([*words, "--no-json"]) == 0
    out = capsys.readouterr().out
    assert [text for text in there if f"\n  {text}" not in f"\n{out}"] == []
    assert [text for text in not_there if f"  {text}" in out] == []


def test_a_pattern_without_options_is_refused(capsys):
    assert main(["options", "ppo.", "--algorithm", "grpo"]) == 2
    assert "no option of grpo and flattening has 'ppo.'" in capsys.readouterr().err


def test_examples_name_the_folder_that_they_are_written_to(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["examples", "mine"]) == 0 and main(["slurm-scripts", "jobs"]) == 0
    assert f"RLHF_SPMD_VENV={sys.prefix}" in capsys.readouterr().out
    assert {path.name for path in Path("jobs").iterdir()} == {"env.sh", "launch.sh", "stages.sh", "train.sbatch"}
    for path in Path("mine").glob("*.yaml"):
        assert Path(yaml.safe_load(path.read_text(encoding="utf-8"))["data"]["prompts"]).is_file()
    (model,) = re.findall(r"--model (\S+embedded/tiny/actor)", Path("mine/README.md").read_text(encoding="utf-8"))
    assert (Path(model) / "config.json").is_file()


def test_an_existing_folder_is_left_as_it_is(tmp_path, capsys):
    assert main(["slurm-scripts", str(tmp_path / "new")]) == 0 and (tmp_path / "new" / "train.sbatch").stat().st_size
    assert main(["examples", str(tmp_path / "new")]) == 2 and "exists already" in capsys.readouterr().err
    assert not (tmp_path / "new" / "grpo.yaml").exists()
