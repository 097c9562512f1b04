"""`bench scan` for one's own ideas: cases, what is searched over, rows as CSV, mistakes."""

import csv
import json
from dataclasses import replace

import pytest

from bench.forecast.scan import main
from bench.forecast.suites import SUITES
from bench.rows import RESULTS

MINE = """from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement


def place(workload, cluster, *, tp: int = 1, zero: int = 0, colour: str = "red"):
    calls = workload.workflow.placed_calls
    layout = Layout.grid_of(cluster.ranks, tp=tp, zero=zero)
    return Placement({c.name: layout if c.kind == "train" else Layout.grid_of(cluster.ranks, tp=tp) for c in calls})
"""


@pytest.fixture
def mine(tmp_path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE, encoding="utf-8")
    return str(path)


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
