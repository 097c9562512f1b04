"""`bench scan` for one's own ideas: cases, what is searched over, rows as CSV, mistakes."""

import csv
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench.forecast.own_ideas import own_cases
from bench.forecast.scan import machine, main
from bench.forecast.suites import SUITES
from bench.rows import RESULTS, STRATEGIES
from rlhf_spmd.errors import UserError

MINE = """from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement


def place(workload, cluster, *, tp: int = 1, zero: int = 0, colour: str = "red"):
    calls = workload.workflow.placed_calls
    layout = Layout.grid_of(cluster.ranks, tp=tp, zero=zero)
    return Placement({c.name: layout if c.kind == "train" else Layout.grid_of(cluster.ranks, tp=tp) for c in calls})
"""


DEFAULTS = {
    "calibration": None,
    "device_type": None,
    "preset": None,
    "layout": None,
    "algorithm": None,
    "strategy": [],
    "csv": None,
    "overrides": [],
}


def words(**given) -> SimpleNamespace:
    return SimpleNamespace(**DEFAULTS | given)


@pytest.fixture
def mine(tmp_path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE, encoding="utf-8")
    return str(path)


def test_own_strategies_stand_beside_the_others_in_every_place(mine):
    quick = SUITES["quick"].cases
    assert own_cases(quick, words()) == quick
    found = own_cases(quick, words(strategy=[mine], overrides=["strategy.tp=2", "mini_batch=256"]))
    assert found[: len(quick)] == quick
    assert [(case.layout, case.options) for case in found[len(quick) :]] == [("1x8", {"tp": 2}), ("2x8", {"tp": 2})]
    one = own_cases(SUITES["algorithms"].cases, words(preset="llama-13b", layout="4x8", strategy=[mine]))
    assert {(case.preset, case.layout) for case in one} == {("llama-13b", "4x8")}
    others = {case.strategy for case in own_cases(SUITES["baselines"].cases, words(preset="llama-70b", layout="4x8"))}
    assert others == {*STRATEGIES, "deepspeed-chat", "zero3-per-token"} - {"interleaving2", "separation"}
    assert len(one) == 4 * (len(STRATEGIES) + 1) and {case.algorithm for case in one} > {"grpo", "remax"}


def test_other_machines():
    quick = SUITES["quick"].cases
    moved = own_cases(quick, words(device_type="h100-80g"))
    assert len(moved) == len(quick) and {case.calibration for case in moved} == {"h100-80g-derived"}
    mixed = replace(quick[0], layout="1x8+2x8", calibration="a100-80g,h100-80g")
    assert machine(mixed)[0].device_types == ("a100-80g", "h100-80g")
    with pytest.raises(UserError, match="layout 1x8 wants nodes of 1 types"):
        machine(replace(mixed, layout="1x8"))


def test_a_scan_of_one_place(mine, tmp_path, capsys, monkeypatch):
    """With models of two sizes; the committed rows stay."""
    flattening = replace(SUITES["all"], cases=tuple(c for c in SUITES["all"].cases if c.strategy == "flattening"))
    monkeypatch.setitem(SUITES, "all", flattening)
    before, out = (RESULTS / "scan.jsonl").read_bytes(), tmp_path / "mine.csv"
    given = ["--strategy", mine, "--preset", "llama-7b", "--layout", "1x8", "--csv", str(out)]
    options = ["shape=critic=llama-13b,reward=llama-7b", "rollout_batch=64", "mini_batch=32"]
    assert main([*given, *options]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == {"bench": "scan", "suite": "all", "cases": 2, "ok": True}
    with out.open(encoding="utf-8") as file:
        flat, own = csv.DictReader(file)
    assert (flat["strategy"], own["strategy"]) == ("flattening", mine) and own["overrides"] == " ".join(options)
    assert float(own["iteration_s"]) > 0 and "tp=" in own["options"]
    assert (RESULTS / "scan.jsonl").read_bytes() == before
