"""`python -m rlhf_spmd plan`: what it prints, what it writes, what it refuses, and which calibration it takes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_spmd.__main__ import main
from rlhf_spmd.command_line import plans
from rlhf_spmd.command_line.fitting_strategies import COMPARED
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.forecast_summary import call_s
from tests.unit.verbs.test_check import HEAVY

CPU = {
    "version": 1,
    "provenance": "made up",
    "devices": {
        "cpu": {
            "matrix_flops": 5e10,
            "memory_bytes_per_s": 1e10,
            "host_bytes_per_s": 5e9,
            "layer_s": 2e-4,
            "decode_layer_s": 3e-4,
            "num_workers": 2,
        }
    },
    "inside": {"bytes_per_s": 1e9, "latency_s": 1e-4},
    "between": {"bytes_per_s": 1e9, "latency_s": 1e-4},
}
SMALL = ["--preset", "qwen2.5-0.5b", "--layout", "1x2", "--calibration", "a100-80g", "--method", "two_phase"]


@pytest.fixture
def cpu_file(tmp_path) -> str:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(CPU), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> tuple[str, dict, Path]:
    """Returns standard output, last line and module of one planning, in a process of its own."""
    folder = tmp_path_factory.mktemp("plan")
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "rlhf_spmd",
        "plan",
        "--json",
        *SMALL,
        "--out",
        str(folder / "mine.py"),
    ]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert {name for name in imported if name.partition(".")[0] in HEAVY} == set()
    return done.stdout, json.loads(done.stdout.splitlines()[-1]), folder / "mine.py"


def refusal(capsys, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    found = capsys.readouterr()
    assert found.out == "" and found.err.count("\n") == 1 and found.err.startswith("rlhf_spmd: error: ")
    return found.err


# ---- what is found ---------------------------------------------------------------------------------------------------


def test_the_winner_is_a_strategy_with_that_forecast(planned):
    _, result, path = planned
    config, cluster = load("qwen2.5-0.5b"), Cluster.parse("1x2", "a100-80g")
    program = load_strategy(str(path)).compile(make_workload(config), cluster, {})
    found = forecast(program, load_calibration("a100-80g"))
    assert found.makespan_s == pytest.approx(result["forecast_s"])
    source = path.read_text(encoding="utf-8")
    for call, seconds in call_s(found).items():
        assert call == "estimate_advantages" or f"{call:15}  {seconds:<7.4g}" in source
    for command in (["check"], ["format", "--check"]):
        config_file = Path(__file__).parents[3] / "pyproject.toml"
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "--config", str(config_file), str(path)]
        assert subprocess.run(ruff, capture_output=True, check=False).returncode == 0


def shown_in_the_readme() -> list[list[str]]:
    """Returns the rows of the table of `plan` there, in words."""
    text = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    block = text.partition("```text\n  plan ")[2].partition("```")[0]
    return [line.split() for line in block.splitlines()[1:]]


README_CASE = ["--preset", "llama-13b", "--layout", "2x8", "--device-type", "a100-80g"]


def test_the_readme_shows_the_forecast_of_a_strategy(capsys):
    row = next(row for row in shown_in_the_readme() if row[0] == "flattening")
    options = [f"strategy.{word}" for word in row if "=" in word]
    assert main(["forecast", "flattening", *README_CASE, *options]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row[1] == f"{result['forecast_s']:.4g}" and row[3:5] == [f"{result['peak_bytes'] / 2**30:.1f}", "GiB"]


def test_nothing_is_overwritten_unless_told(planned, capsys, tmp_path):
    _, _, path = planned
    before = path.read_text(encoding="utf-8")
    assert "mine.py exists already; pass --overwrite" in refusal(capsys, *SMALL, "--out", str(path))
    assert path.read_text(encoding="utf-8") == before
    picture = tmp_path / "old.png"
    picture.write_text("old", encoding="utf-8")
    arguments = (*SMALL, "--out", str(tmp_path / "new.py"), "--timeline", str(picture))
    assert "old.png exists already" in refusal(capsys, *arguments) and not (tmp_path / "new.py").exists()


def test_overrides_change_the_plan_and_are_told(capsys, tmp_path, cpu_file, monkeypatch):
    """And so is a budget that was too small for a proof."""
    search = plans.search
    monkeypatch.setattr(plans, "search", lambda *given, **options: replace(search(*given, **options), gap=0.25))
    out, picture = tmp_path / "plans" / "one.py", tmp_path / "one.png"
    words = ["rollout_batch=8", "mini_batch=8"]
    command = ["plan", "--layout", "1x2", "--calibration", cpu_file, "--out", str(out), "--timeline", str(picture)]
    assert main([*command, "--top", "1", "--method", "two_phase", *words]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert "budget" in first and "up to 25.0% faster" in first
    assert len(json.loads(last)["plans"]) == 1 + len(COMPARED)
    assert "Planned with rollout_batch=8 mini_batch=8." in " ".join(out.read_text(encoding="utf-8").split())
    assert picture.read_bytes().startswith(b"\x89PNG")


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--calibration", "a100-80"], "unknown calibration 'a100-80' (did you mean 'a100-80g'?)"),
        (["--layout", "2by8"], "layout '2by8' is not of the form NxG"),
        (["--preset", "llama-13"], "unknown preset 'llama-13' (did you mean 'llama-13b'?)"),
        (["--method", "guess"], "invalid choice: 'guess'"),
        (["--top", "0"], "'0' is not a whole number of at least 1"),
        (
            ["strategy.zero=1"],
            "strategy.zero is an option of a strategy, but the planner chooses every layout; drop it",
        ),
        (["--device-type", "h200-141g"], "no calibration of h200-141g is shipped; give --calibration FILE.json"),
        (["--calibration", "a100-80g", "--device-type", "cpu"], "does not know devices of type cpu, only a100-80g"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_input_is_one_message(capsys, arguments, message):
    assert message in refusal(capsys, *arguments)


def test_what_fits_nowhere_says_by_how_much_and_what_to_lower(capsys):
    message = refusal(
        capsys, "--preset", "llama-70b", "--layout", "1x4", "--calibration", "a100-80g", "--method", "two_phase"
    )
    for words in (
        "fits 1x4",
        "75.2 GiB of 80.0 GiB that it may use",
        "; or use more devices",
    ):
        assert words in message


@pytest.mark.slow
def test_memory_is_kept_for_evaluations(capsys, tmp_path):
    """`check` has no error about a plan with the options that it was planned with. Before, plans counted only the
    responses of training, which are shorter here."""
    (tmp_path / "held_out.txt").write_text("one prompt\n", encoding="utf-8")
    cluster, out = ["--layout", "1x4", "--preset", "llama-7b"], str(tmp_path / "one.py")
    words = [f"eval.prompts={tmp_path / 'held_out.txt'}", "eval.max_new_tokens=145000"]
    assert main(["plan", *cluster, "--method", "two_phase", "--out", out, *words]) == 0
    assert main(["check", out, *cluster, "--device-type", "a100-80g", *words]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ok"] is True
    message = refusal(capsys, *cluster, "--method", "two_phase", words[0], "eval.max_new_tokens=700000")
    assert "that fits 1x4 was found" in message and "eval.max_new_tokens=700000, " in message
