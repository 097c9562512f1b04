"""Bench first-light: a dry walk on the CPU; steps that fail, crash or hang leave the others alone; its arithmetic."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.first_light import facts, first_light
from bench.first_light.steps import GPU, STEPS, TWO_GPUS, Step
from bench.rows import read_rows
from tests.run_mpi import REPOSITORY
from tests.started import is_alive

PLANTS = "tests.planted_steps"
LIMIT_S = 300.0  # of a dry walk on a busy machine
PROCESSOR_S = 180.0  # of a dry walk of all steps


def planted(name: str, limit_s: float = 60.0) -> Step:
    return Step(name, f"{name} is planted", f"{PLANTS}:{name}", limit_s)


def verdicts_of(folder: Path) -> dict[str, dict]:
    return {row["step"]: row for row in json.loads((folder / "verdicts.json").read_text(encoding="utf-8"))}


def rows_of(folder: Path) -> list[dict]:
    return read_rows(folder / "rows.jsonl")


# ---- walks -----------------------------------------------------------------------------------------------------------


@pytest.mark.timed
def test_one_bad_step_leaves_the_others_alone(tmp_path):
    names = ("passes", "crashes")
    last = Step("afterwards", "runs alone, at last", f"{PLANTS}:passes", 60.0, group="speed")
    steps = [*map(planted, names), planted("hangs", limit_s=6.0), last]
    began = time.monotonic()
    found = first_light.walk(steps, tmp_path, budget_s=120.0, together=2, dry=True)
    assert time.monotonic() - began < 60
    assert [row["step"] for row in found] == [step.name for step in steps]
    told = {row["step"]: (row["verdict"], row["told"]) for row in found}
    assert told["passes"] == ("passed", "as planted") == told["afterwards"]
    assert told["crashes"] == ("failed", "status -11: about to crash")
    assert told["hangs"] == ("timed out", "by its own limit; last: begins to hang")
    assert verdicts_of(tmp_path) == {row["step"]: row for row in found}
    assert not is_alive(int((tmp_path / "child").read_text(encoding="utf-8")))
    rows = rows_of(tmp_path)
    assert [row["number"] for row in rows] == [1.5, 3, 1.5]  # what was measured before the end is kept
    assert {"date", "commit", "hardware", "python", "versions", "device", "driver"} <= rows[0].keys()
    assert "about to crash" in (tmp_path / "logs.txt").read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["child", "logs.txt", "rows.jsonl", "verdicts.json"]
    assert "hangs            timed out" in first_light.show(found)


def walked_dry(folder: Path, *options: str) -> dict[str, dict]:
    command = [sys.executable, "-m", "bench", "first-light", "--dry", "--out", str(folder), *options]
    budget = ["--budget-s", str(LIMIT_S)]
    done = subprocess.run(
        [*command, *budget], cwd=REPOSITORY, capture_output=True, encoding="utf-8", timeout=2 * LIMIT_S
    )
    found = verdicts_of(folder)
    bad = {name: row["told"] for name, row in found.items() if row["verdict"] in ("failed", "timed out")}
    assert not bad, done.stdout + done.stderr + (folder / "logs.txt").read_text(encoding="utf-8")[-5000:]
    last = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and last["ok"] and 0 < last["processor_s"] <= PROCESSOR_S
    return found


@pytest.mark.slow
def test_a_dry_walk_of_all_steps(tmp_path):
    found = walked_dry(tmp_path, "--allow-skipped")
    assert list(found) == [step.name for step in STEPS]
    assert all(row["verdict"] == "passed" or row["verdict"].startswith("skipped: ") for row in found.values())
    steps_with_rows = {row["step"] for row in rows_of(tmp_path)}
    assert steps_with_rows == {name for name, row in found.items() if row["verdict"] == "passed"}
    files = {path.name for path in tmp_path.iterdir()}
    assert {"calibration.json", "decode-2-rows.json.gz"} <= files and len(files) <= 8


@pytest.mark.parametrize(("code", "num"), [("print('a warning'); print(2)", 2), ("print(0)", 0), ("raise OSError", 0)])
def test_gpus_are_counted_by_another_process(code, num, tmp_path, monkeypatch):
    """Once: torch takes seconds to import, from a cold disk a minute."""
    (tmp_path / "torch.py").write_text(f"class cuda:\n    device_count = lambda: {num}\n{code}\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts.num_gpus.cache_clear()
    assert facts.num_gpus() == num
    assert (facts.is_here(GPU, dry=False), facts.is_here(TWO_GPUS, dry=False)) == (num > 0, num > 1)
    facts.num_gpus.cache_clear()
