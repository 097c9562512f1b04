"""`python -m bench measure` on two ranks of this machine."""

import json

import pytest

from bench.rows import read_rows
from bench.speed.measure import main

SMALL = ("rollout_batch=4", "mini_batch=4", "micro_batch=2", "data.max_prompt=16", "generation.max_new_tokens=8")
CELL = ("--layout", "1x2", "--preset", "llama-15m", "--iterations", "2", "--warmup", "1")


def measured(out, *strategies: str) -> list[dict]:
    main([*CELL, "--strategy", *strategies, "--out", str(out), *SMALL, "dtype=float32"])
    return read_rows(out)


def test_a_row_a_cell(tmp_path, capsys):
    out = tmp_path / "measure" / "rows.jsonl"
    rows = measured(out, "flattening", "heterogeneous")
    good, refused = rows
    assert good["samples_per_s"] == pytest.approx(4 / good["iteration_s"]) and not good["why_not"]
    assert good["tflops"] > 0 and good["peak_bytes"] > 2**28 and good["calls"]["actor_train"]["measured_s"] > 0
    assert refused["iteration_s"] is None and "heterogeneous" in refused["why_not"] and not refused["out_of_memory"]
    run = next((tmp_path / "measure" / "runs").glob("*-flattening"))
    assert all(row["response_length"] == 8 for row in read_rows(run / "metrics.jsonl"))
    assert not [path for path in run.rglob("*.safetensors")]  # no weights are kept
    assert measured(out, "flattening", "heterogeneous") == rows  # nothing is measured twice
    said = capsys.readouterr().out
    assert json.loads(said.splitlines()[-1])["ok"] and "heterogeneous: " in said


@pytest.mark.slow
def test_the_same_model_under_each_strategy(tmp_path):
    out = tmp_path / "rows.jsonl"
    assert all(not row["why_not"] for row in measured(out, "flattening", "separation", "reallocation"))
    runs = [read_rows(path) for path in (tmp_path / "runs").glob("*/metrics.jsonl")]
    assert len(runs) == 3 and len({tuple(row["tokens_sha256"] for row in run) for run in runs}) == 1
