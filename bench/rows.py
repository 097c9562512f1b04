"""Result rows: one JSON object per line with commit, hardware, versions and date, so that a number can be traced."""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_spmd.runtime.profile.machine import processor
from rlhf_spmd.runtime.records.software import commit, version_of

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "bench" / "results"
TIMELINES = RESULTS / "timelines.json"  # what `bench strategies` recorded of the runs that are drawn
PACKAGES = ("torch", "deepspeed", "mpi4py", "numpy")
STRATEGIES = ("flattening", "interleaving1", "interleaving2", "separation", "reallocation", "planner")  # forecast
SHIPPED = STRATEGIES[:-1]
BASELINES = DEEPSPEED_CHAT, PER_TOKEN = "deepspeed-chat", "zero3-per-token"  # other systems, as strategies of rows
TIMED = ("iteration_s", "generate_s", "gen_tokens_per_s", "evaluation_s", "tflops", "mfu", "peak_bytes")  # of a run
Finish = Callable[[list[dict]], list[dict]]
DIRTY = "-dirty"  # how a commit ends that does not say what was run
ABOUT = ("date", "commit", "hardware", "python", "versions")  # of every row


@dataclass
class Output:
    """Where benches write: `--out`. again: measure rows anew that are there: `--again`."""

    folder: Path = REPOSITORY / "runs" / "bench"
    again: bool = False


OUTPUT = Output()


class Arguments(argparse.ArgumentParser):
    """The arguments of a bench.

    about: its docstring, of which the help shows the whole.
    writes: whether it writes rows.
    fills: whether it measures only rows that are not there yet.
    """

    def __init__(self, name: str, about: str | None, *, writes: bool = True, fills: bool = False):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f"python -m bench {name}", description=about, formatter_class=form)
        if writes:
            text = "where rows are written (default: runs/bench; bench/results are the rows of the documents)"
            self.add_argument("--out", type=Path, metavar="FOLDER", default=Output.folder, help=text)
        if fills:
            self.add_argument("--again", action="store_true", help="measure rows anew that are there")

    def add_some(self, name: str, choices: Iterable[str], metavar: str) -> None:
        """Adds words of which each is one of the choices; none: all."""
        text = f"{', '.join(choices)}; none: all"
        self.add_argument(name, nargs="*", choices=choices, default=[*choices], metavar=metavar, help=text)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if value != action.default:  # a list, which is none of the choices
            super()._check_value(action, value)

    def parse_args(self, arguments: Any = None, namespace: Any = None) -> Any:
        parsed = super().parse_args(arguments, namespace)
        OUTPUT.folder, OUTPUT.again = getattr(parsed, "out", Output.folder), getattr(parsed, "again", False)
        return parsed


def written(name: str, folder: Path | None = None) -> Path:
    """Returns the file of the rows of a bench in a folder; None: where benches write."""
    return (folder or OUTPUT.folder) / f"{name}.jsonl"


def rows_so_far(name: str, folder: Path | None = None) -> list[dict]:
    """Returns the rows that are there."""
    return rows_at(written(name, folder))


def provenance() -> dict:
    """Says where and with what a row was measured."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(REPOSITORY, (".", ":!bench/results")) or None,
        "hardware": f"{processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in PACKAGES},
    }


def write(name: str, rows: list[dict], folder: Path | None = None) -> Path:
    """Replaces NAME.jsonl in a folder; None: where benches write. A row that says itself when and with what it was
    measured keeps that."""
    path = written(name, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    about, part = provenance(), path.with_suffix(".tmp")  # a bench that is killed meanwhile keeps its rows
    part.write_text(
        "".join(json.dumps(row | {key: row.get(key, about[key]) for key in ABOUT}) + "\n" for row in rows),
        encoding="utf-8",
    )
    return part.replace(path)


def read_rows(path: Path) -> list[dict]:
    """Reads the rows of a file of results."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rows_at(path: Path) -> list[dict]:
    """Reads the rows of a file; none, if it does not exist."""
    return read_rows(path) if path.exists() else []


def clean_rows(name: str) -> list[dict]:
    """Reads bench/results/NAME.jsonl for a document. Raises ValueError if a commit does not say what was run."""
    rows = read_rows(RESULTS / f"{name}.jsonl")
    if dirty := sum((row["commit"] or DIRTY).endswith(DIRTY) for row in rows):
        raise ValueError(
            f"bench/results/{name}.jsonl: {dirty} of {len(rows)} rows were measured with changes that no commit holds; "
            "commit them and measure again"
        )
    return rows


def add(name: str, rows: list[dict], folder: Path | None = None) -> Path:
    """Appends rows to NAME.jsonl; the earlier ones keep their date and commit."""
    return write(name, rows_so_far(name, folder) + rows, folder)


def keep(name: str, rows: list[dict], keys: Sequence[str], order: Callable[[dict], Any] = lambda row: 0) -> None:
    """Writes rows in place of those of NAME.jsonl that have the same values of these keys, keeps the others, and sorts
    all by `order`."""
    every = [*rows_so_far(name), *rows]  # a new row keeps an old one's place
    places = {tuple(row.get(key) for key in keys): row for row in every}
    write(name, sorted(places.values(), key=order))


def fill(
    name: str,
    cases: Iterable[dict],
    measure: Callable[[dict], dict | list[dict]],
    *,
    together: int = 1,
    finish: Finish = list,
) -> list[dict]:
    """Measures the cases that NAME.jsonl lacks, or all `--again`, and writes the rows of each as they come, so that an
    interrupted bench goes on where it was -> all rows. A case is a part of its rows.

    together: runs at the same time.
    finish: what all rows become before they are written.
    """
    rows, cases = rows_so_far(name), list(cases)
    if OUTPUT.again:
        rows = [row for row in rows if not any(case.items() <= row.items() for case in cases)]
    missing = [case for case in cases if not any(case.items() <= row.items() for row in rows)]

    def rows_of(case: dict) -> list[dict]:
        about, found = provenance(), measure(case)
        start = {"bench": name.replace("_", "-")} | case
        return [start | row | about for row in (found if isinstance(found, list) else [found])]

    with ThreadPoolExecutor(together) as pool:
        for found in pool.map(rows_of, missing):
            rows = finish([*rows, *found])
            write(name, rows)
            for row in found:
                shown = (f"{key} {value}" for key, value in row.items() if not isinstance(value, dict | list))
                print(", ".join(shown), flush=True)
    return rows


def on_ranks(num_ranks: int, arguments: Sequence[str], *, limit_s: float = 1800.0, package: str = "bench") -> None:
    """Starts `python -m PACKAGE ARGUMENTS` on so many ranks of this machine. Raises if it fails."""
    subprocess.run([*on(num_ranks), package, *arguments], cwd=REPOSITORY, timeout=limit_s, check=True)


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
    command = [*on(num_ranks), *within, *words]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, check=False, **told)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def train(num_ranks: int, options: Sequence[str], *, limit_s: float = 900.0, **more: Any) -> tuple[dict, list[dict]]:
    """Trains; `more` are arguments of `run` -> the last line of the run and its metrics rows."""
    result = run(num_ranks, ["train", "--json", *options], limit_s=limit_s, **more)
    return result, read_rows(Path(result["run_dir"]) / "metrics.jsonl")


def on(num_ranks: int, launcher: str | None = None) -> list[str]:
    """Returns the words that start a module on ranks.

    launcher: words instead of mpirun with its number of ranks.
    """
    mpirun = [str(Path(sys.executable).with_name("mpirun")), "-n", str(num_ranks)] if num_ranks > 1 else []
    return [*(launcher.split() if launcher else mpirun), sys.executable, "-m"]
