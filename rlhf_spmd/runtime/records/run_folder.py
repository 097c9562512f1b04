"""The folder of a run: its options, program, metrics, samples, models and checkpoints. Only rank 0 writes.

    config.json     the resolved configuration          metrics.jsonl          one object per iteration
    strategy.py     the source of the strategy          events.out.tfevents.*  the same for TensorBoard
    program.json    fingerprint and summary             samples.jsonl, .txt    responses before and after
    timeline.json   Chrome trace, opens in Perfetto     ROLE/                  a trained model (Hugging Face)
    timeline.png    the same as a picture               forecast.json          seconds of calls, forecast and measured
    checkpoints/    for `train --resume`                cluster.toml           if one was given
    algorithm.py    the algorithm's page, if it is the user's
    evaluations.jsonl one object per evaluation, with eval.prompts; best/ROLE/ the model with the best checkpoint.best
    rollouts/       every sample of some iterations, with rollouts.every
    wandb_id, wandb/, mlflow_id, trackio_id: with wandb=, mlflow= or trackio=PROJECT

Only a resumed run writes into an existing folder, and only into its own.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import re
import socket
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from rlhf_spmd.config.evaluation_metrics import titled
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.json_text import finite, json_lines, json_text, numbered_values
from rlhf_spmd.files.printing import formatted, on_one_line
from rlhf_spmd.plan.calls import Workflow
from rlhf_spmd.runtime.checkpoint.checkpoint_files import DIRECTORY_MODE, gone
from rlhf_spmd.runtime.failure.failures import advice
from rlhf_spmd.runtime.records.loggers import TRACKED, Curves
from rlhf_spmd.runtime.world.trace import write_chrome

CONFIG, METRICS, EVALUATIONS = "config.json", "metrics.jsonl", "evaluations.jsonl"
BEFORE_CONFIG = (".lock", "strategy.py", "program.json", "cluster.toml", "algorithm.py", "wandb", *TRACKED)
DESCRIPTION = (CONFIG, "strategy.py", "program.json", "cluster.toml", "algorithm.py")  # copied into checkpoints
TEXTS = ("tokens_sha256",)  # metrics that are no numbers
FIND_S = 10.0  # after which a shared file system shows a new folder on all hosts


@dataclass(frozen=True, slots=True)
class Sample:
    """A response to one prompt before training and, at the end of a run, after it."""

    prompt_index: int
    prompt: str
    before: str
    reward_before: float | None  # None: a resumed run has read NaN, which JSON does not have
    after: str | None = None
    reward_after: float | None = None
    by_turns: bool = False  # whether the responses are episodes, whose texts have lines (episode_text.py)


Shown = tuple[str, float | None]  # a response and its reward


class RunFolder:
    """Writes a run's files. If `writes` is false (on every rank but 0) all methods do nothing."""

    def __init__(self, path: str | Path, *, writes: bool = True) -> None:
        # absolute, so that user code may change the working folder; shown: as the user wrote it
        self.shown, self.path, self.writes = Path(path), Path(path).absolute(), writes
        self.notes: list[str] = []  # files that could not be written and why; the console prints them at the end
        self._lock: TextIO | None = None
        self._has_rows = False  # this process has written some into metrics.jsonl
        self.curves = Curves(self.path, self.notes)

    @classmethod
    def create(cls, root: str | Path, *, strategy: str, name: str | None = None) -> RunFolder:
        """Makes root/name, or root/<date>-<time>-<strategy>[-n]; called on rank 0 only. Raises UserError if the name is
        taken or the folder can't be made."""
        root = Path(root)
        if name is not None and (name != Path(name).name or name in ("", ".", "..")):
            raise UserError(f"run name {name!r} is not a plain folder name: leave out slashes (the parent is {root})")
        stem = name or f"{time.strftime('%Y%m%d-%H%M%S')}-{re.sub(r'[^A-Za-z0-9_]+', '-', Path(strategy).stem)}"
        try:
            if not root.is_dir():
                root.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
            for number in itertools.count(1):
                made = cls(root / (stem if number == 1 else f"{stem}-{number}"))
                try:
                    made.path.mkdir(DIRECTORY_MODE)
                except FileExistsError:
                    if name is None:
                        continue
                    made._take()
                return made
        except OSError as error:
            raise UserError(f"the run folder can't be made in {root}: {error.strerror or error}") from None
        raise AssertionError("the loop has no end")

    def _take(self) -> None:
        """Takes over a folder in which a run was killed before it wrote config.json, which is written last. Raises
        UserError if there is more in it."""
        names = {path.name for path in self.path.iterdir()} - {*BEFORE_CONFIG}
        drafts = {name for name in names if name.startswith(".") and name.rpartition(".")[2].isdigit()}
        if names == drafts or (self.path / ".lock").is_file():
            self.lock()  # another run may begin there now, or go on
        if names != drafts:
            raise UserError(
                f"{self.shown} exists already and is never overwritten: give another name, or go on with --resume "
                f"{self.shown}"
            )
        for draft in drafts:
            (self.path / draft).unlink()

    def find(self) -> None:
        """Raises UserError if this rank's host does not show the folder that rank 0 has made."""
        end = time.monotonic() + FIND_S
        while not self.path.is_dir():
            if time.monotonic() > end:
                raise UserError(
                    f"the run folder {self.shown} is not there on {socket.gethostname()}: put it on a disk that all "
                    "hosts share (--runs FOLDER)"
                )
            time.sleep(FIND_S / 100)

    def lock(self) -> None:
        """Locks the folder until this process ends. Raises UserError if another process has locked it."""
        if not self.writes:
            return
        self._lock = (self.path / ".lock").open("w", encoding="utf-8")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.shown} is in use by another run: wait until it ends, or end it") from None
        except OSError:  # a file system without locks
            pass

    def texts(self) -> dict[str, str]:
        """Returns the files that describe the run, by name; empty on other ranks than 0."""
        paths = [self.path / name for name in DESCRIPTION if self.writes]
        return {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}

    def metrics(self, num_iterations: int, needed: Iterable[str] = ()) -> list[dict[str, Any]]:
        """Reads the rows of the first iterations in metrics.jsonl. Raises UserError for what is no number.

        needed: numbers that all have.
        """
        rows = [row for row in self.rows(METRICS) if row.get("iteration") in range(num_iterations)]
        for row in rows:
            for name in {*needed, *row} - {*TEXTS}:
                if not isinstance(row.get(name), float | int):
                    raise UserError(
                        f"{self.path / METRICS}, iteration {row['iteration']} has no number as {name}, so it is not of "
                        "this run; restore the file"
                    )
        return rows

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Returns the objects of a file of lines, with NaN for null; none if there is no file. Raises UserError for a
        line that is none, except for the last one of metrics.jsonl, of which a killed run may have written a part."""
        values = list(numbered_values(self.path / name))
        if name == METRICS and values and values[-1][1] is None:
            values.pop()
        rows = []
        for number, row in values:
            if not isinstance(row, dict):
                raise UserError(f"{self.path / name}, line {number} is not an object of JSON; restore the file")
            rows.append({key: math.nan if value is None else value for key, value in row.items()})
        return rows

    def check(self) -> None:
        """Raises UserError if the folder was deleted, emptied or replaced since it was locked."""
        try:
            if self._has_rows:
                (self.path / METRICS).stat()
            is_same = self._lock is None or os.path.samestat(
                os.fstat(self._lock.fileno()), (self.path / ".lock").stat()
            )
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise gone(self.path)

    def write_evaluations(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replaces evaluations.jsonl, and adds a point of the last row to each curve."""
        if rows or (self.path / EVALUATIONS).is_file():
            self.write(EVALUATIONS, "".join(json.dumps(finite(row)) + "\n" for row in rows))
        if self.writes and rows:
            values = {f"eval/{name}": value for name, value in titled(rows[-1]).items() if isinstance(value, float)}
            self.curves.add(rows[-1]["iteration"], values)

    def keep_metrics(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replaces metrics.jsonl by the rows of the iterations that a resumed run does not compute again."""
        self.curves.purge_step = len(rows)
        self.write(METRICS, "".join(json.dumps(finite(row)) + "\n" for row in rows))

    def write_metrics(
        self,
        iteration: int,
        metrics: Mapping[str, float | str],
        groups: Mapping[str, str] = {},
        more: Mapping[str, float] = {},
    ) -> None:
        """Adds a line to metrics.jsonl and a point to each curve; both are on disk when this returns. JSON has null for
        NaN.

        groups: metric -> group of its curve.
        more: points of further curves.
        """
        if not self.writes:
            return
        path = self.path / METRICS
        with writing(path):
            self.check()
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"iteration": iteration} | finite(metrics)) + "\n")
        self._has_rows = True
        values = {name: value for name, value in metrics.items() if not isinstance(value, str)}  # tokens_sha256
        named = {f"{groups.get(name, 'other')}/{name}": value for name, value in values.items()}
        self.curves.add(iteration, {**named, **more})

    def write_samples(self, samples: Sequence[Sample]) -> None:
        """Replaces samples.jsonl and samples.txt."""
        self.write("samples.jsonl", json_lines(finite(asdict(sample)) for sample in samples))
        self.write("samples.txt", format_samples(samples))

    def write_timeline(self, records: Sequence[Mapping[str, object]], *, title: str, workflow: Workflow) -> None:
        """Writes timeline.json with all records and timeline.png with the last iterations. See trace.py."""
        if not self.writes:
            return
        from rlhf_spmd.runtime.pictures.timeline import write_png

        with writing(self.path / "timeline.json"):
            write_chrome(self.path / "timeline.json", records, about={"title": title})
        with writing(self.path / "timeline.png"):
            write_png(self.path / "timeline.png", records, title=title, workflow=workflow)

    def close(self) -> None:
        """Finishes the curves."""
        self.curves.close()

    def write_values(self, name: str, values: Mapping[str, Any]) -> None:
        """Writes a file of JSON."""
        self.write(name, json_text(values, indent=2) + "\n")

    def write(self, name: str, text: str) -> None:
        """Writes a temporary file and renames it, so that a killed run leaves the old file or the whole new one."""
        if not self.writes:
            return
        temporary = self.path / f".{name}.{os.getpid()}"
        with writing(self.path / name):
            with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())  # the same after a power failure
            temporary.replace(self.path / name)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises UserError if the block can't write this file of a run."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not path.parent.is_dir():
            raise gone(path.parent) from None
        raise UserError(f"{path} can't be written: {error.strerror or error}; {advice(error)}") from error


def format_samples(samples: Iterable[Sample], width: int = 100) -> str:
    """Samples as text: prompt, response before, response after, each wrapped and with its reward. Line breaks and
    control characters, all of which a model can emit, are shown as escapes. Episodes have their own lines."""
    blocks = []
    for sample in samples:
        rows = [("prompt", "", sample.prompt), ("before", _signed(sample.reward_before), sample.before)]
        if sample.after is not None:
            rows.append(("after", _signed(sample.reward_after), sample.after))
        lines = [f"sample {sample.prompt_index}"]
        for label, reward, text in rows:
            if sample.by_turns and label != "prompt":
                lines += [f"  {label} {reward}".rstrip(), *(f"  {line}" for line in text.split("\n"))]
                continue
            wrapped = textwrap.wrap(on_one_line(text), max(20, width - 21)) or ["(nothing)"]
            lines.append(f"  {label:<7}{reward:>8}  | {wrapped[0]}")
            lines += [f"  {'':<15}  | {line}" for line in wrapped[1:]]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _signed(reward: float | None) -> str:
    return "" if reward is None else formatted(reward, "{:+.3f}")
