"""The main job as a user starts it: what it prints, what it leaves behind, and that its numbers are its own seed's."""

import json
import os
import re
import shlex
import stat
from pathlib import Path

import pytest

from rlhf_spmd.__main__ import main
from rlhf_spmd.embedded import path_of
from tests.folders import write_all
from tests.noise import LIMIT, in_standard_errors
from tests.page_runs import hashes, metrics
from tests.unit.files.test_output import on_terminal

RESULT_KEYS = {
    "strategy",
    "ranks",
    "iterations",
    "reward_first",
    "reward_last",
    "kl_first",
    "kl_last",
    "gen_tokens_per_s",
    "parity_max_abs",
    "iteration_s",
    "forecast_s",
    "scaled_by",
    "wall_s",
    "run_dir",
    "reward_timeouts",
    "saved",
}


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    return [*write_all(tmp_path_factory.mktemp("models")), "iterations=2"]


@pytest.fixture(scope="module")
def finished(overrides, warm, tmp_path_factory) -> tuple[str, dict, Path]:
    """Returns standard output, last line and run folder of one run on four ranks, in a container that has no umask."""
    runs = tmp_path_factory.mktemp("runs") / "new"
    before = os.umask(0)
    try:
        status, stdout, stderr = warm.run(["train", "--json", *overrides, "--runs", runs, "--name", "one"], 4)
    finally:
        os.umask(before)
    assert status == 0, stderr
    return stdout, json.loads(stdout.splitlines()[-1]), runs / "one"


def test_last_line(finished):
    stdout, result, folder = finished
    assert set(result) == RESULT_KEYS
    assert (result["strategy"], result["ranks"], result["iterations"]) == ("flattening", 4, 2)
    assert Path(result["run_dir"]) == folder
    assert 0 <= result["parity_max_abs"] < 1e-4


def test_a_person_sees_progress_samples_and_the_next_command(finished):
    stdout, _, folder = finished
    for words in ("1/2", "2/2", "left", "before", "after", "timeline.png", str(folder), "s per iteration"):
        assert words in stdout
    (following,) = re.findall(r"^Next: python -m rlhf_spmd (.+)$", stdout, re.MULTILINE)
    assert main(shlex.split(following)) == 0 and (folder / "report.html").is_file()
    assert stdout.startswith("rlhf_spmd: PPO by flattening on 4 ranks\n")
    for line in (r"reward +[+-][\d.]+ -> [+-][\d.]+", r"kl +-?[\d.]+ -> -?[\d.]+ nats per response"):
        assert re.search(rf"^  {line}$", stdout, re.MULTILINE), line
    assert re.search(rf"^  trained actor +{folder}/actor \(a Hugging Face folder\)$", stdout, re.MULTILINE)


def test_run_folder(finished):
    _, result, folder = finished
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["rollout_batch"] == 24
    assert "def place(" in (folder / "strategy.py").read_text(encoding="utf-8")
    assert len(json.loads((folder / "program.json").read_text(encoding="utf-8"))["fingerprint"]) == 16
    rows = metrics(folder)
    assert [row["iteration"] for row in rows] == [0, 1]
    for row in rows:
        assert len(row["tokens_sha256"]) == 64
        assert {"reward", "kl", "kl_coef", "policy_loss", "value_loss", "clip_fraction", "actor_grad_norm"} <= set(row)
    for name in ("reward", "kl"):
        assert (result[f"{name}_first"], result[f"{name}_last"]) == (rows[0][name], rows[-1][name])
    assert result["saved"] == ["actor"] and (folder / "actor" / "config.json").is_file()
    assert not (folder / "critic").exists()
    assert list(folder.glob("events.out.tfevents.*"))
    assert len((folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()) == 4 * 3  # 3 of them are shown
    assert (folder / "timeline.png").read_bytes()[:4] == b"\x89PNG"
    for path in (folder.parent, folder):
        assert not path.stat().st_mode & 0o007, "a run folder is not for the world"
    assert [path for path in folder.rglob("*") if path.stat().st_mode & stat.S_IWOTH] == [], "whatever the umask"


def test_on_a_terminal(finished, overrides, warm, tmp_path):
    """Without mpirun it is one rank, and the same run. No line of the table or the next command is longer than the
    terminal is wide, unless one word is, the cursor stays where it is, and there is no JSON."""
    words = [*overrides, "--runs", str(tmp_path), "--name", "shown"]
    said = on_terminal([*warm.command(), "train", *words], 80, NO_COLOR="1", TERM="dumb")
    assert hashes(tmp_path / "shown") == hashes(finished[2]) and "rlhf_spmd: PPO by flattening on 1 rank\n" in said
    lines = said.split("\n")
    assert "\r" not in said and "\x1b" not in said
    (heading,) = [line for line in lines if line.startswith("iteration   ")]
    assert len(heading) <= 80 and heading.split()[-2:] == ["seconds", "left"]
    assert {len(line) for line in lines if re.match(" +[12]/2 ", line)} == {len(heading)}
    following = said[said.index("\nNext: ") + 1 :]
    assert lines[-1] == "" and '{"' not in said
    assert all(len(line) <= 80 or len(line.split()) <= 2 for line in following.split("\n"))
    assert following.replace("\\\n", "").split()[:5] == ["Next:", "python", "-m", "rlhf_spmd", "report"]


def test_actor_folder_loads_in_transformers(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished[2] / "actor"
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == 63
    assert AutoTokenizer.from_pretrained(folder)("ba be").input_ids


MIXTURE = path_of("mixture/actor")
TWO_TYPES = """[[nodes]]
devices = 2
device = "cpu"
[[nodes]]
devices = 2
device = "slow"
[types.slow]
memory_gib = 2
"""
MORE = [("interleaving2", "strategy.zero=3"), ("separation",), ("separation", "strategy.zero=3")]
MORE += [("reallocation", "strategy.training_tp=2", "strategy.training_pp=2", "strategy.offload=true")]
MORE[-1] += ("strategy.tokens=40",)  # tests/mpi/test_layouts.py has each of these
OTHERS = [
    *(pytest.param(options, marks=pytest.mark.slow, id=" ".join(options)) for options in MORE),
    ("separation", "strategy.generation_tp=2", "strategy.training_pp=2"),
    ("heterogeneous", "--cluster", "{folder}/cluster.toml"),
]


@pytest.mark.parametrize("options", OTHERS, ids=lambda options: " ".join(options[:3]))
def test_another_strategy_is_the_same_run(options, finished, overrides, warm, tmp_path):
    """Its samples are the same, too; they are generated and scored on the ranks of those calls."""
    (tmp_path / "cluster.toml").write_text(TWO_TYPES, encoding="utf-8")
    options = [option.format(folder=tmp_path) for option in options]
    words = ["train", "--json", *overrides, "--strategy", *options, "--runs", tmp_path, "--name", "other"]
    status, stdout, stderr = warm.run(words, 4)
    assert status == 0, stderr
    assert json.loads(stdout.splitlines()[-1])["strategy"] == options[0]
    assert hashes(tmp_path / "other") == hashes(finished[2])
    pairs = zip(*(samples(folder) for folder in (tmp_path / "other", finished[2])), strict=True)
    for mine, expected in pairs:
        assert {name: mine[name] for name in ("prompt", "before", "after")} == {
            name: expected[name] for name in ("prompt", "before", "after")
        }
        assert mine["reward_after"] == pytest.approx(expected["reward_after"], abs=1e-4)


@pytest.mark.slow
def test_a_mixture_on_two_types_of_devices(warm, tmp_path):
    (tmp_path / "cluster.toml").write_text(TWO_TYPES, encoding="utf-8")
    sizes = ["iterations=2", "rollout_batch=8", "mini_batch=32", "num_samples=0", "eval.prompts=", "checkpoint.every=0"]
    model = ["--preset", "arithmetic", "--algorithm", "grpo", "--model", MIXTURE]
    words = ["train", "--json", *model, *sizes, "--runs", tmp_path, "--strategy"]
    for name, ranks, *options in (("heterogeneous", 4, "--cluster", tmp_path / "cluster.toml"), ("flattening", 0)):
        status, _, stderr = warm.run([*words, name, *options, "--name", name], ranks)
        assert status == 0, stderr
    assert hashes(tmp_path / "heterogeneous") == hashes(tmp_path / "flattening")


def samples(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_run_in_bfloat16_learns_as_on_one_rank(overrides, warm, tmp_path):
    """Rounding lets tokens differ there (docs/numerics.md), but mean rewards lie no further apart than chance puts
    them."""
    words = ["train", *overrides, "dtype=bfloat16", "iterations=4", "num_samples=0", "--runs", tmp_path]
    found = []
    for ranks, strategy in ((0, "flattening"), (3, "separation")):
        status, _, stderr = warm.run([*words, "--strategy", strategy, "--name", strategy], ranks)
        assert status == 0, stderr
        found.append(metrics(tmp_path / strategy))
    one, three = found
    assert in_standard_errors(three, one, num_responses=24) <= LIMIT
    assert three[0]["actor_grad_norm"] == pytest.approx(one[0]["actor_grad_norm"], rel=0.3)


def test_a_strategy_file_and_a_reward_function(finished, overrides, warm, tmp_path):
    (tmp_path / "mine.py").write_text(Path("strategies/_template.py").read_text(encoding="utf-8"), encoding="utf-8")
    function = "def f(prompts, responses):\n    return [float(len(r.split())) for r in responses]\n"
    (tmp_path / "r.py").write_text(function, encoding="utf-8")
    options = ["--strategy", str(tmp_path / "mine.py"), f"reward_function={tmp_path / 'r.py'}:f"]
    options += ["ppo.truncation=score", "strategy.ratio=1/3", "reward_function_mode=add", "iterations=1"]
    words = ["train", "--json", *overrides, *options, "--runs", tmp_path, "--name", "mine"]
    status, stdout, stderr = warm.run(words, 3)
    assert status == 0, stderr
    assert json.loads(stdout.splitlines()[-1])["strategy"] == "mine"
    assert hashes(tmp_path / "mine") == hashes(finished[2])[:1]  # another reward changes nothing before the first step
    first, mine = metrics(finished[2])[0], metrics(tmp_path / "mine")[0]
    assert mine["score"] == pytest.approx(first["score"] + first["response_length"], abs=1.0)  # words, less the EOS


def test_a_dry_run_prints_what_check_does_and_leaves_nothing(overrides, warm, tmp_path):
    words = ["train", "--json", "--dry-run", *overrides, "--strategy", "reallocation", "--runs", tmp_path / "runs"]
    status, stdout, stderr = warm.run(words, 2)
    assert (status, stderr) == (0, "")
    result = json.loads(stdout.splitlines()[-1])
    assert (result["strategy"], result["layout"], result["ok"]) == ("reallocation", "1x2", True)
    assert stdout.splitlines()[-2].startswith("No findings: messages arrive")
    assert stdout.count("Run actor_generate") >= 1
    assert not (tmp_path / "runs").exists()
