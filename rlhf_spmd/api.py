"""The program from Python, as in a notebook: `rlhf_spmd.train` starts the ranks of a run and gives its metrics;
`check`, `forecast` and `find_plan` return what the subcommands say, and `read` a run's files.

A configuration is a file of options, or a mapping of them like such a file. Further options are `KEY=VALUE` texts, and
arguments of the subcommand are keywords: `layout="2x8"` for `--layout 2x8`. Imports neither torch nor MPI.
"""

import atexit
import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhf_spmd.__main__ import read as read_line
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.printing import formatted
from rlhf_spmd.runtime.failure.postmortem import check_is_folder
from rlhf_spmd.runtime.records.rollout_files import read_part
from rlhf_spmd.runtime.records.run_files import read_config, read_rows, reported
from rlhf_spmd.runtime.records.run_folder import EVALUATIONS, METRICS
from rlhf_spmd.verbs.rollouts import chosen, parts_in

Given = str | Path | Mapping[str, Any] | None  # a file of options, or the options
Row = dict[str, Any]
POLL_S, STOP_S, BAR = 0.3, 120.0, 20
_output = threading.Lock()  # sys.stdout is that of all threads


class Result(dict[str, Any]):
    """What a subcommand says to machines. text: what it says to people."""

    text = ""


@dataclass(frozen=True, slots=True)
class Tables:
    """The rows of a run's files, for `pandas.DataFrame(tables.metrics)`."""

    folder: Path
    config: Row
    metrics: list[Row]
    evaluations: list[Row]
    samples: list[Row]

    def rollouts(self, iteration: int | None = None, evaluation: int | None = None) -> list[Row]:
        """Returns all responses of an iteration, by default of the last one that was written, or of an evaluation.
        Raises UserError if there are none."""
        return [row for part in parts_in(chosen(self.folder, iteration, evaluation)) for row in read_part(part)]


def read(run: str | Path) -> Tables:
    """Reads the folder of a run, also while it goes on. Raises UserError."""
    folder = Path(run)
    check_is_folder(folder)
    rows = (read_rows(folder / name) for name in (METRICS, EVALUATIONS, "samples.jsonl"))
    return Tables(folder, read_config(folder), *rows)


def check(*words: str, config: Given = None, **arguments: Any) -> Result:
    """Proves that the program of a strategy cannot hang, and that it fits: `check("mine.py", layout="2x8")`. Raises
    UserError for what the command line refuses; result["ok"] is false for a program that must not start."""
    return _result("check", words, config, arguments)


def forecast(*words: str, config: Given = None, **arguments: Any) -> Result:
    """Forecasts time and memory of a strategy. Raises UserError."""
    return _result("forecast", words, config, arguments)


def find_plan(*words: str, config: Given = None, **arguments: Any) -> Result:
    """Searches the fastest placement, and writes it to the strategy file result["out"]. Raises UserError."""
    return _result("plan", words, config, arguments)


def train(config: Given = None, *words: str, ranks: int = 1, show: bool | None = None, **arguments: Any) -> "Training":
    """Starts the ranks of a run on this machine, and returns the run. Raises UserError.

    show: print a progress bar; None: in a notebook and in a terminal.
    """
    return Training(config, words, ranks, show, arguments)


class Training:
    """A run that has been started: iterating yields the metrics of each iteration as soon as they are there. Leaving
    the loop early stops the run, which writes a checkpoint first; so does the end of the process."""

    def __init__(self, config: Given, words: tuple[str, ...], ranks: int, show: bool | None, arguments: Row) -> None:
        resume = arguments.get("resume")
        if is_named := resume in (None, "auto"):
            arguments = {"runs": "runs", "name": f"{datetime.now():%Y%m%d-%H%M%S-%f}", **arguments}
        self.folder = Path(arguments["runs"], arguments["name"]) if is_named else Path(str(resume))
        self._num_before = len(read_rows(self.folder / METRICS))
        if self._num_before and resume is None:
            raise UserError(f"{self.folder} is a run already: give another name, or resume='{self.folder}'")
        self.show = sys.stdout.isatty() or "ipykernel" in sys.modules if show is None else show
        self._files = tempfile.TemporaryDirectory(prefix="rlhf_spmd-")
        line = _line("train", words, config, arguments, Path(self._files.name))
        read_line(line)  # a mistake is refused here
        self._log = Path(self._files.name) / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*_launcher(ranks), sys.executable, "-m", "rlhf_spmd", *line],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        atexit.register(self._leave)

    @property
    def log(self) -> str:
        """What the run has printed so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def __iter__(self) -> Iterator[Row]:
        """Yields metrics, of a run that is resumed those of further iterations. Raises UserError with the message of a
        run that fails."""
        done = self._num_before
        try:
            while True:
                is_over = self.process.poll() is not None
                for row in read_rows(self.folder / METRICS)[done:]:
                    done += 1
                    self._show(done, row)
                    yield row
                if is_over:
                    break
                time.sleep(POLL_S)
        finally:
            self.stop()
        if self.process.returncode:
            raise UserError(self.log[self.log.find("rlhf_spmd: error: ") :].removeprefix("rlhf_spmd: error: ").rstrip())

    def wait(self) -> Tables:
        """Waits for the end of the run, and returns its files. Raises UserError if it fails."""
        for _ in self:
            pass
        return read(self.folder)

    def stop(self) -> None:
        """Stops the run, if it goes on, after it has written a checkpoint."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _leave(self) -> None:
        """Stops the run at the end of this process."""
        if self.process.poll() is None:
            why = "this process ends, and nobody waited for it: call wait()"
            print(f"rlhf_spmd: note: {self.folder} is stopped, because {why}", file=sys.stderr)
            self.stop()

    def _show(self, done: int, row: Row) -> None:
        """Prints the progress bar in place of the one before."""
        if self.show:
            config = read_config(self.folder)
            total = config.get("iterations") or done
            names = [name for name in reported(self.folder, config).headlines if isinstance(row.get(name), int | float)]
            values = "  ".join(f"{name} {formatted(row[name])}" for name in names)
            filled = "#" * round(BAR * min(done / total, 1.0))
            print(f"\r[{filled:<{BAR}}] {done}/{total}  {values}", end="" if done < total else "\n", flush=True)


def _result(verb: str, words: tuple[str, ...], config: Given, arguments: Row) -> Result:
    """Runs a subcommand in this process."""
    shown = io.StringIO()
    with _output, tempfile.TemporaryDirectory(prefix="rlhf_spmd-") as folder, redirect_stdout(shown):
        line = _line(verb, words, config, arguments | {"json": True}, Path(folder))
        importlib.import_module(f"rlhf_spmd.verbs.{verb}").run(read_line(line))
    text, _, values = shown.getvalue().rstrip().rpartition("\n")
    result = Result(json.loads(values))
    result.text = text
    return result


def _line(verb: str, words: tuple[str, ...], config: Given, arguments: Row, folder: Path) -> list[str]:
    """Returns a command line. folder: for a file of the options of a mapping."""
    if isinstance(config, Mapping):
        file = folder / "config.json"
        file.write_text(json.dumps(config, default=_plain), encoding="utf-8")
        config = file
    values = {"config": config, **arguments}
    flags = {f"--{name.replace('_', '-')}": value for name, value in values.items() if value not in (None, False)}
    given = [part for flag, value in flags.items() for part in ([flag] if value is True else [flag, str(value)])]
    return [verb, *words, *given]


def _plain(value: Any) -> Any:
    """Returns a path, or numbers of numpy, as JSON has it. Raises UserError for anything else."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise UserError(f"an option is {value!r}: give texts, numbers and lists; functions are named, as in mine.py:score")


def _launcher(ranks: int) -> list[str]:
    """Returns the words that start so many ranks. Raises UserError, also if there is no mpirun."""
    if not isinstance(ranks, int) or ranks < 1:
        raise UserError(f"ranks={ranks!r}: give a whole number, at least 1")
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None and ranks > 1:
        raise UserError("there is no mpirun: pip install 'rlhf-spmd[mpi]', or use ranks=1")
    return [found, "-n", str(ranks)] if found and ranks > 1 else []
