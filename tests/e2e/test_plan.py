"""`train --strategy auto` as a user starts it: planned on every rank, kept, compared with its forecast, run again."""

import json
import re
from pathlib import Path

import pytest

from rlhf_spmd.runtime.run.forecast_report import WHOLE
from tests import warm
from tests.folders import write_all
from tests.page_runs import metrics
from tests.unit.verbs.test_plan import CPU


def start(num_ranks: int, *arguments: str) -> tuple[int | None, str, str]:
    return warm.shared().run([*arguments, "--json"], num_ranks)


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    return write_all(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def calibration(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("calibration") / "mine.json"
    path.write_text(json.dumps(CPU), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def planned(overrides, calibration, tmp_path_factory) -> tuple[str, Path]:
    """Returns standard output and run folder of a run on two ranks that planned for itself."""
    runs = tmp_path_factory.mktemp("runs")
    words = ["--strategy", "auto", "--calibration", calibration, "--runs", str(runs), "--name", "auto"]
    status, stdout, stderr = start(2, "train", *words, *overrides)
    assert status == 0, stderr
    return stdout, runs / "auto"


def test_a_run_that_plans_for_itself_trains(planned):
    stdout, folder = planned
    assert json.loads(stdout.splitlines()[-1])["strategy"] == "auto"
    source = (folder / "strategy.py").read_text(encoding="utf-8")
    assert "def place(workload: Workload, cluster: Cluster) -> Placement:" in source


def test_its_strategy_runs_again_with_the_same_tokens(planned, overrides, calibration, tmp_path):
    _, folder = planned
    words = ["--strategy", str(folder / "strategy.py"), "--runs", str(tmp_path), "--name", "again"]
    status, _, stderr = start(2, "train", *words, "--calibration", calibration, *overrides)
    assert status == 0, stderr
    first, second = (
        json.loads((path / "program.json").read_text(encoding="utf-8")) for path in (folder, tmp_path / "again")
    )
    assert first["fingerprint"] == second["fingerprint"]
    for one, other in zip(*map(metrics, (folder, tmp_path / "again")), strict=True):
        assert one["tokens_sha256"] == other["tokens_sha256"]


def test_the_run_stands_beside_its_forecast(planned):
    stdout, folder = planned
    assert re.search(r"s per iteration \(forecast: [0-9.]+ s\)", stdout)
    found = json.loads((folder / "forecast.json").read_text(encoding="utf-8"))
    rows = {row["call"]: row for row in found["rows"]}
    assert found["calibration"] == "mine" and {"actor_generate", "actor_train", "critic_train", WHOLE} <= set(rows)
    iterations = metrics(folder)
    for row in rows.values():
        assert 0 < row["measured_s"] < max(one["iteration_s"] for one in iterations) + 1.0
        assert row["forecast_s"] > 0
    assert rows[WHOLE]["measured_s"] >= rows["actor_generate"]["measured_s"]


def test_measurement_decides_where_there_are_ranks(overrides, calibration, tmp_path):
    out = tmp_path / "quickest.py"
    words = ["--measure-top", "2", "--calibration", calibration, "--method", "two_phase", "--out", str(out)]
    status, stdout, stderr = start(2, "plan", *words, *overrides)
    assert status == 0, stderr
    result = json.loads(stdout.splitlines()[-1])
    assert len(result["plans"]) == 2 and result["measured_s"] == min(result["plans"].values()) > 0
    assert out.read_text(encoding="utf-8").startswith(f'"""{result["name"]}: ')
    status, stdout, _ = start(1, "check", str(out), "--layout", "1x2", *overrides)
    assert status == 0 and json.loads(stdout.splitlines()[-1])["ok"]
    status, _, stderr = start(2, "plan", *words, "--layout", "1x4", *overrides)
    assert status == 2 and "runs the plans on these 2 ranks, and 1x4 has others" in stderr
