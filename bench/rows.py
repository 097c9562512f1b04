"""Result rows: one JSON object per line with commit, hardware, versions and date, so that a number can be traced."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_spmd.runtime.records.software import commit, version_of

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "bench" / "results"
TIMELINES = RESULTS / "timelines.json"  # what `bench strategies` recorded of the runs that are drawn
PACKAGES = ("torch", "deepspeed", "mpi4py", "numpy")
STRATEGIES = ("flattening", "interleaving1", "interleaving2", "separation", "reallocation", "planner")  # forecast
TIMED = ("iteration_s", "generate_s", "gen_tokens_per_s", "evaluation_s")  # metrics of a run that are times
Finish = Callable[[list[dict]], list[dict]]
DIRTY = "-dirty"  # how a commit ends that does not say what was run
ABOUT = ("date", "commit", "hardware", "python", "versions")  # of every row


def provenance() -> dict:
    """Says where and with what a row was measured."""
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
    """Reads the rows of a file of results."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def clean_rows(name: str) -> list[dict]:
    """Reads bench/results/NAME.jsonl for a document. Raises ValueError if a commit does not say what was run."""
    rows = read_rows(RESULTS / f"{name}.jsonl")
    if dirty := sum((row["commit"] or DIRTY).endswith(DIRTY) for row in rows):
        raise ValueError(
            f"bench/results/{name}.jsonl: {dirty} of {len(rows)} rows were measured with changes that no commit holds; "
            "commit them and measure again"
        )
    return rows


def add(name: str, rows: list[dict]) -> Path:
    """Appends rows to bench/results/NAME.jsonl; the earlier ones keep their date and commit."""
    path = RESULTS / f"{name}.jsonl"
    return write(name, (read_rows(path) if path.exists() else []) + rows)


def keep(name: str, rows: list[dict], keys: Sequence[str], order: Callable[[dict], Any] = lambda row: 0) -> None:
    """Writes rows in place of those of bench/results/NAME.jsonl that have the same values of these keys, keeps the
    others, and sorts all by `order`."""
    path = RESULTS / f"{name}.jsonl"
    old = read_rows(path) if path.exists() else []
    places = {tuple(row.get(key) for key in keys): row for row in [*old, *rows]}  # a new row keeps an old one's place
    write(name, sorted(places.values(), key=order))


def fill(
    name: str, cases: Iterable[dict], measure: Callable[[dict], dict], *, together: int = 1, finish: Finish = list
) -> list[dict]:
    """Measures the cases that bench/results/NAME.jsonl lacks, and writes each row as it comes, so that an interrupted
    bench goes on where it was -> all rows. A case is a part of its row.

    together: runs at the same time.
    finish: what all rows become before they are written.
    """
    path = RESULTS / f"{name}.jsonl"
    rows = read_rows(path) if path.exists() else []
    missing = [case for case in cases if not any(case.items() <= row.items() for row in rows)]

    def row_of(case: dict) -> dict:
        about = provenance()
        return {"bench": name.replace("_", "-")} | case | measure(case) | about

    with ThreadPoolExecutor(together) as pool:
        for row in pool.map(row_of, missing):
            rows = finish([*rows, row])
            write(name, rows)
            print(", ".join(f"{key} {value}" for key, value in row.items() if key not in ABOUT), flush=True)
    return rows


def on_ranks(num_ranks: int, arguments: Sequence[str], *, limit_s: float = 1800.0, package: str = "bench") -> None:
    """Starts `python -m PACKAGE ARGUMENTS` on so many ranks of this machine. Raises if it fails."""
    subprocess.run([*_on(num_ranks), package, *arguments], cwd=REPOSITORY, timeout=limit_s, check=True)


def rows_of_ranks(bench: str, num_ranks: int, arguments: Sequence[str] = ()) -> list[dict]:
    """Starts a bench on ranks with `--on-ranks FILE` and reads the rows that rank 0 writes there."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        on_ranks(num_ranks, [bench, "--on-ranks", str(file), *arguments])
        return read_rows(file)


@contextmanager
def one_world(file: Path | None = None, measured: Sequence[dict] = ()) -> Iterator[Any]:
    """Yields the world of a rank, on CPUs; what fails on one rank ends all. If `rows_of_ranks` has started the ranks,
    rank 0 writes what was measured into its file in the end."""
    from rlhf_spmd.runtime.world.world import World

    world = World.discover()
    world.use_device("cpu")
    try:
        yield world
        world.shutdown()
    except BaseException as error:
        world.fail(error)
    if file and world.rank == 0:
        file.write_text("".join(json.dumps(row) + "\n" for row in measured), encoding="utf-8")


def run(
    num_ranks: int,
    words: Sequence[str],
    *,
    limit_s: float = 3600.0,
    environment: Mapping[str, str] | None = None,
    within: Sequence[str] = ("rlhf_spmd",),
) -> dict:
    """Runs the program as a user would; returns the JSON of its last line. Raises if it fails.

    environment: of the program instead of this one's.
    within: the module that runs it, with its arguments.
    """
    told = {"capture_output": True, "text": True, "timeout": limit_s}
    command = [*_on(num_ranks), *within, *words]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, check=False, **told)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def train(num_ranks: int, options: Sequence[str], *, limit_s: float = 900.0, **more: Any) -> tuple[dict, list[dict]]:
    """Trains; `more` are arguments of `run` -> the last line of the run and its metrics rows."""
    result = run(num_ranks, ["train", "--json", *options], limit_s=limit_s, **more)
    return result, read_rows(Path(result["run_dir"]) / "metrics.jsonl")


def _on(num_ranks: int) -> list[str]:
    return [str(Path(sys.executable).with_name("mpirun")), "-n", str(num_ranks), sys.executable, "-m"]
