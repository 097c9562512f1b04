"""Result rows: one JSON object per line with commit, hardware, versions and date, so that a number can be traced."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rlhf_spmd.runtime.records.software import commit, version_of

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "bench" / "results"
PACKAGES = ("torch", "deepspeed", "mpi4py", "numpy")
STRATEGIES = (
    "flattening",
    "interleaving1",
    "interleaving2",
    "separation",
    "reallocation",
    "planner",
)  # that are forecast
TIMED = ("iteration_s", "generate_s", "gen_tokens_per_s", "evaluation_s")  # metrics of a run that are times
ABOUT = ("date", "commit", "hardware", "python", "versions")  # of every row


def provenance() -> dict:
    """Where and with what a row was measured."""
    models = [line.split(":")[1].strip() for line in _cpu_info() if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(REPOSITORY, (".", ":!bench/results")) or None,
        "hardware": f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in PACKAGES},
    }


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def write(name: str, rows: list[dict]) -> Path:
    """Replaces bench/results/NAME.jsonl. A row that says itself when and with what it was measured keeps that."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    about = provenance()
    path.write_text(
        "".join(json.dumps(row | {key: row.get(key, about[key]) for key in ABOUT}) + "\n" for row in rows),
        encoding="utf-8",
    )
    return path


def read_rows(path: Path) -> list[dict]:
    """The rows of a file of results."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def add(name: str, rows: list[dict]) -> Path:
    """Appends rows to bench/results/NAME.jsonl; the earlier ones keep their date and commit."""
    path = RESULTS / f"{name}.jsonl"
    return write(name, (read_rows(path) if path.exists() else []) + rows)


def on_ranks(num_ranks: int, arguments: list[str], *, limit_s: float = 900.0, package: str = "bench") -> None:
    """Starts `python -m PACKAGE ARGUMENTS` on so many ranks of this machine. Raises if it fails."""
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    command = [mpirun, "-n", str(num_ranks), sys.executable, "-m", package, *arguments]
    subprocess.run(command, cwd=REPOSITORY, timeout=limit_s, check=True)


def train(
    num_ranks: int,
    options: list[str],
    *,
    limit_s: float = 900.0,
    environment: Mapping[str, str] | None = None,
) -> tuple[dict, list[dict]]:
    """Runs the program as a user would; returns its last line and its metrics rows. environment: of the program instead
    of this one's. Raises if it fails."""
    mpirun = Path(sys.executable).with_name("mpirun")
    command = [str(mpirun), "-n", str(num_ranks), sys.executable, "-m", "rlhf_spmd", "train", "--json", *options]
    told = {"capture_output": True, "text": True, "timeout": limit_s}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, check=False, **told)
    if done.returncode:
        raise RuntimeError(f"{' '.join(options)} ended with {done.returncode}:\n{done.stderr}")
    result = json.loads(done.stdout.splitlines()[-1])
    rows = [
        json.loads(line)
        for line in (Path(result["run_dir"]) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return result, rows
