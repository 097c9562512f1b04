"""`python -m bench measure` on two ranks of this machine."""

import json

import pytest

from bench.rows import read_rows
from bench.speed.measure import main

SMALL = ("rollout_batch=4", "mini_batch=4", "micro_batch=2", "data.max_prompt=8", "generation.max_new_tokens=4")
CELL = ("--layout", "1x2", "--preset", "llama-15m", "--iterations", "1", "--warmup", "1")


def measured(out, *strategies: str) -> list[dict]:
    main([*CELL, "--strategy", *strategies, "--out", str(out), *SMALL, "dtype=float32"])
    return read_rows(out)


@pytest.mark.slow
def test_a_row_a_cell(tmp_path, capsys):
    out = tmp_path / "measure" / "rows.jsonl"
    rows = measured(out, "flattening", "heterogeneous")
    good, refused = rows
    assert good["samples_per_s"] == pytest.approx(4 / good["iteration_s"]) and not good["why_not"]
    assert good["tflops"] > 0 and good["peak_bytes"] > 2**28 and good["calls"]["actor_train"]["measured_s"] > 0
    assert refused["iteration_s"] is None and "heterogeneous" in refused["why_not"] and not refused["out_of_memory"]
    run = next((tmp_path / "measure" / "rows").glob("*-flattening"))
    assert all(row["response_length"] == 4 for row in read_rows(run / "metrics.jsonl"))
    assert not [path for path in run.rglob("*.safetensors")]  # no weights are kept
    assert measured(out, "flattening", "heterogeneous") == rows  # nothing is measured twice
    said = capsys.readouterr().out
    assert json.loads(said.splitlines()[-1])["ok"] and "strategy heterogeneous" in said


@pytest.mark.slow
def test_memory_that_runs_out_is_a_row(tmp_path):
    words = (
        "--layout",
        "1x1",
        "--preset",
        "llama-7b",
        "--strategy",
        "flattening",
        "--warmup",
        "0",
        "--iterations",
        "1",
    )
    main([*words, "--out", str(tmp_path / "rows.jsonl"), "--launcher", "prlimit --as=2200000000 mpirun -n 1"])
    (row,) = read_rows(tmp_path / "rows.jsonl")
    assert row["out_of_memory"] and "can't allocate memory" in row["why_not"] and row["iteration_s"] is None
