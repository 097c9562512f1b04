"""Bench first-light: a dry walk on the CPU; steps that fail, crash or hang leave the others alone; its arithmetic."""

import configparser
import functools
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.first_light import checks, first_light, steady, steps
from bench.first_light.speed import LLAMA_1B
from bench.first_light.steps import STEPS, Light, Step
from bench.rows import read_rows
from rlhf_spmd.kernels.decode_attention import choose_parts
from rlhf_spmd.runtime.generation.cuda_graphs import graph_size
from tests.run_mpi import REPOSITORY

PLANTS = "tests.planted_steps"
QUICK = "engine,sample"
LIMIT_S = 300.0  # of a dry walk on a busy machine
PROCESSOR_S = 180.0  # of a dry walk of all steps


def planted(name: str, limit_s: float = 60.0) -> Step:
    return Step(name, f"{name} is planted", f"{PLANTS}:{name}", limit_s)


def verdicts_of(folder: Path) -> dict[str, dict]:
    return {row["step"]: row for row in json.loads((folder / "verdicts.json").read_text(encoding="utf-8"))}


def rows_of(folder: Path) -> list[dict]:
    return read_rows(folder / "rows.jsonl")


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# ---- walks -----------------------------------------------------------------------------------------------------------


@pytest.mark.timed
def test_one_bad_step_leaves_the_others_alone(tmp_path):
    names = ("passes", "fails", "raises", "crashes", "lacks")
    last = Step("afterwards", "runs alone, at last", f"{PLANTS}:passes", 60.0, group="speed")
    steps = [*map(planted, names), planted("hangs", limit_s=6.0), last]
    began = time.monotonic()
    found = first_light.walk(steps, tmp_path, budget_s=120.0, together=2, dry=True)
    assert time.monotonic() - began < 60
    assert [row["step"] for row in found] == [step.name for step in steps]
    told = {row["step"]: (row["verdict"], row["told"]) for row in found}
    assert told["passes"] == ("passed", "as planted") == told["afterwards"]
    assert told["fails"] == ("failed", "below 70%")
    assert told["raises"][0] == "failed" and "planted error" in told["raises"][1]
    assert told["crashes"] == ("failed", "status -11: about to crash")
    assert told["lacks"] == ("skipped: a sanitizer", "")
    assert told["hangs"] == ("timed out", "by its own limit; last: begins to hang")
    assert verdicts_of(tmp_path) == {row["step"]: row for row in found}
    assert not is_alive(int((tmp_path / "child").read_text(encoding="utf-8")))
    rows = rows_of(tmp_path)
    assert [row["number"] for row in rows] == [1.5, 2, 3, 1.5]  # what was measured before the end is kept
    assert {"date", "commit", "hardware", "python", "versions", "device", "driver"} <= rows[0].keys()
    assert "planted error" in (tmp_path / "logs.txt").read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["child", "logs.txt", "rows.jsonl", "verdicts.json"]
    assert "hangs            timed out" in first_light.show(found)


@pytest.mark.timed
def test_the_budget_ends_all(tmp_path):
    """A step that is under way is stopped, those in line are not begun."""
    steps = [planted("hangs"), planted("passes")]
    began = time.monotonic()
    found = first_light.walk(steps, tmp_path, budget_s=first_light.LEAST_S + 1, together=1, dry=True)
    assert time.monotonic() - began < 30
    assert [row["verdict"] for row in found] == ["timed out", "not reached: budget"]
    assert found[0]["told"].startswith("by the budget")


def test_steps_whose_needs_are_missing_are_skipped(tmp_path, monkeypatch):
    step = Step("passes", "needs two things", f"{PLANTS}:passes", 60.0, needs=("a telescope", "patience"))
    monkeypatch.setattr(first_light.Walk, "facts", {"missing": ["patience", "a telescope", "torch"]})
    found = first_light.walk([step], tmp_path, budget_s=60.0, dry=True)
    assert found[0]["verdict"] == "skipped: a telescope, patience" and rows_of(tmp_path) == []


@pytest.mark.parametrize(
    ("names", "options", "status"),
    [("passes,lacks", [], 3), ("passes,lacks", ["--allow-skipped"], 0), ("lacks,fails", [], 1)],
)
def test_skipped_steps_are_told_and_are_no_success(names, options, status, tmp_path, monkeypatch, capsys):
    planted_steps = list(map(planted, names.split(",")))
    monkeypatch.setattr(first_light, "STEPS", planted_steps)
    monkeypatch.setattr(first_light.signal, "signal", lambda *_: None)
    assert first_light.main(["--dry", "--out", str(tmp_path), *options]) == status
    lines = capsys.readouterr().out.splitlines()
    is_told = f"1 of {len(planted_steps)} steps skipped: lacks (a sanitizer)" in lines
    assert is_told == ("lacks" in names) == bool(json.loads(lines[-1])["skipped"])


def test_steps_have_the_environment_of_runs(monkeypatch, tmp_path):
    for name in ("PYTORCH_ALLOC_CONF", "NCCL_SET_THREAD_NAME"):
        monkeypatch.delenv(name, raising=False)
    found = steps.environment(dry=False)
    assert found["PYTORCH_ALLOC_CONF"] == "expandable_segments:True" and found["NCCL_SET_THREAD_NAME"] == "1"
    slept: list[int] = []
    monkeypatch.setattr(steps, "sleep_while_waiting", slept.append)
    for sleeps, dry in ((True, True), (True, False), (False, False)):
        step = replace(planted("passes"), sleeps=sleeps)
        steps.run_one(step, Light("passes", tmp_path, tmp_path, dry))
    assert slept == [0] and [step.name for step in STEPS if not step.sleeps] == ["decode-spinning"]


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


def test_a_dry_walk_of_some_steps(tmp_path):
    found = walked_dry(tmp_path, "--steps", QUICK)
    assert list(found) == ["device", *QUICK.split(",")]
    assert all(row["verdict"] == "passed" for row in found.values())
    assert all(row["dry"] and row["device"].startswith("CPU") for row in rows_of(tmp_path))


@pytest.mark.slow
def test_a_dry_walk_of_all_steps(tmp_path):
    found = walked_dry(tmp_path, "--allow-skipped")
    assert list(found) == [step.name for step in STEPS]
    assert all(row["verdict"] == "passed" or row["verdict"].startswith("skipped: ") for row in found.values())
    steps_with_rows = {row["step"] for row in rows_of(tmp_path)}
    assert steps_with_rows == {name for name, row in found.items() if row["verdict"] == "passed"}
    files = {path.name for path in tmp_path.iterdir()}
    assert {"calibration.json", "decode-2-rows.json.gz"} <= files and len(files) <= 8


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_every_kernel_test_that_takes_a_device_is_run():
    takes = re.compile(r"^def test_\w+\([^)]*\bdevice\b", re.MULTILINE)
    files = (REPOSITORY / "tests" / "unit").rglob("test_*.py")
    found = {path.stem.removeprefix("test_") for path in files if takes.search(path.read_text(encoding="utf-8"))}
    assert found == set(checks.KERNEL_TESTS)


@pytest.mark.parametrize("num_processors", [132, pytest.param(148, marks=pytest.mark.slow)])
def test_steady_meets_all_kernels_in_its_first_iterations(num_processors, monkeypatch):
    """The number of parts of a row's attention is a constant of the kernel, and follows rows and longest sequence."""
    made: list[dict] = []
    parts_of = functools.cache(choose_parts)  # the same for most of the iterations

    class Recorded:
        def __init__(self, model, **options):
            made.append(options)

        def submit(self, prompts, *_):
            self.num = min(len(prompts), made[-1]["max_sequences"])

        def run(self):
            counts = {*range(1, self.num + 1), *map(graph_size, range(1, self.num + 1))}
            pairs, longest = [num * LLAMA_1B.num_kv_heads for num in counts], made[-1]["longest"]
            made[-1]["parts"] = {parts_of(num, longest, num_processors) for num in pairs}

    monkeypatch.setattr(steady, "Engine", Recorded)
    monkeypatch.setattr(steady, "passes_of", lambda *_: lambda: None)
    monkeypatch.setattr(steady, "random_model", lambda *_: torch.nn.Linear(1, 1))
    monkeypatch.setattr(steady, "make_engine", lambda *_, **__: SimpleNamespace(update=lambda lr: None))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    light = SimpleNamespace(dry=False, device=torch.device("cpu"), row=lambda **_: None)
    assert steady.steady(light).ok and len(made) == steady.ITERATIONS
    first = set().union(*(one["parts"] for one in made[: steady.WARM]))
    assert all(one["parts"] <= first for one in made)


def test_the_documented_installation_takes_every_step():
    """What steps need beside tools and an MPI library is in the requirements or the extras of the recipe."""
    text = (REPOSITORY / "docs" / "install.md").read_text(encoding="utf-8")
    (extras,) = re.findall(r'pip install -c constraints-cuda.txt -e "\.\[([a-z,]+)\]"', text)
    about = configparser.ConfigParser()
    about.read(REPOSITORY / "setup.cfg", encoding="utf-8")
    lists = [
        about["options"]["install_requires"],
        *(about["options.extras_require"][name] for name in extras.split(",")),
    ]
    installed = {
        re.match(r"[\w-]+", entry.strip()).group()
        for entry in ";".join(lists).replace("\n", ";").split(";")
        if entry.strip()
    }
    others = {steps.GPU, steps.TWO_GPUS, steps.MPI, "mpiexec", "compute-sanitizer", "tqdm"}  # tqdm: of transformers
    assert {name for step in STEPS for name in step.needs} - others <= installed
