"""`python -m rlhf_spmd forecast`: one strategy in seconds and bytes, without torch and MPI, and what it refuses."""

import json

import pytest

from rlhf_spmd.__main__ import main
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.bottleneck import limits
from rlhf_spmd.plan.cost.forecast import forecast
from tests.unit.verbs.test_draw import MINE

BIG = ["--layout", "1x8", "--preset", "llama-7b"]


@pytest.fixture
def mine(tmp_path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE, encoding="utf-8")
    return str(path)


def test_a_strategy_file_in_numbers(mine, capsys):
    """The numbers are those of the simulator for the same program."""
    words = ["strategy.tp=8", "micro_batch=2", "rollout_batch=64", "mini_batch=64"]
    assert main(["forecast", mine, *BIG, *words]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    workload = make_workload(load("llama-7b", words[1:]))
    program = load_strategy(mine).compile(workload, Cluster.parse("1x8", "a100-80g"), {"tp": "8"})
    calibration = load_calibration("a100-80g-derived")
    assert result["forecast_s"] == forecast(program, calibration).makespan_s
    assert result["samples_per_s"] == pytest.approx(64 / result["forecast_s"])
    assert {call: found["limit"] for call, found in result["calls"].items()} == limits(program, calibration)
    assert result["ok"] and result["missing_bytes"] == 0 and 2**30 < result["peak_bytes"] < 76 * 2**30
    shown = "\n".join(text)
    for part in ("by calibration a100-80g", "sequences/s", "limited by", "dp1 pp1 tp8", "KV cache", "reserve  device"):
        assert part in shown


def test_evaluations_have_seconds_of_their_own(tmp_path, capsys):
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "the cat"}\n' * 6, encoding="utf-8")
    words = ["--layout", "1x4", "rollout_batch=16", "mini_batch=16"]
    evaluated = [f"eval.prompts={tmp_path}/held_out.jsonl", "eval.every=3"]
    told = []
    for more in ([], evaluated, [*evaluated, "eval.max_new_tokens=8"]):
        assert main(["forecast", "reallocation", *words, *more]) == 0
        *text, last = capsys.readouterr().out.splitlines()
        told.append(json.loads(last))
        shown = [line for line in text if "s per evaluation (before training, every 3 iterations" in line]
        assert len(shown) == bool(more)
    without, with_evaluations, short = told
    assert without["evaluation_s"] is None and without["forecast_s"] == with_evaluations["forecast_s"]
    assert 0 < short["evaluation_s"] < with_evaluations["evaluation_s"] < with_evaluations["forecast_s"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["flatening"], "did you mean 'flattening'?"),
        ([], "STRATEGY"),
        (["flattening", "--out", "a.pdf"], "give it the ending .png"),
        (["flattening", "strategy.nothing=1"], "unknown option 'nothing'"),
        (["flattening", "--device-type", "h200-141g"], "no calibration of h200-141g is shipped"),
    ],
)
def test_mistakes_are_one_message(words, message, capsys):
    assert main(["forecast", *words]) == 2
    found = capsys.readouterr()
    assert found.out == "" and found.err.count("\n") == 1 and message in found.err
