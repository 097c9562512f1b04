"""One folder per run: everything needed to know what ran, how it went and what came of it. Only rank 0 writes.

    config.json     the resolved configuration          metrics.jsonl          one object per iteration
    strategy.py     the source of the strategy          events.out.tfevents.*  the same for TensorBoard
    program.json    fingerprint and summary             samples.jsonl, .txt    responses before and after
    timeline.json   Chrome trace, opens in Perfetto     ROLE/                  a trained model (Hugging Face)
    timeline.png    the same as a picture               forecast.json          seconds of calls, forecast and measured
    checkpoints/    what `train --resume` goes on from  cluster.toml           if one was given
    algorithm.py    the page, of a file of the user's
    wandb_id, wandb/ with `wandb=PROJECT`

Only the run itself, resumed, writes into an existing folder: two runs can't mix, and no result is lost.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import socket
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.workflow import Workflow
from rlhf_spmd.runtime.checkpoint.store import gone
from rlhf_spmd.runtime.observe.trace import write_chrome
from rlhf_spmd.runtime.run.loggers import EVENTS, WANDB_ID, Curves
from rlhf_spmd.runtime.run.timeline import write_png

DIRECTORY_MODE = 0o750
CONFIG = "config.json"
BEFORE_CONFIG = (".lock", "strategy.py", "program.json", "cluster.toml", "algorithm.py", "wandb", WANDB_ID)
FIND_S = 10.0  # a file system may show a folder so much later to other hosts
PNG_ITERATIONS = 2  # drawn in timeline.png


@dataclass(frozen=True, slots=True)
class Sample:
    """A response to one prompt before training and, when there is one, after."""

    prompt_index: int
    prompt: str
    before: str
    reward_before: float
    after: str | None = None
    reward_after: float | None = None


class RunFolder:
    """Writes a run's files. Where `writes` is false (every rank but 0) all methods do nothing."""

    def __init__(self, path: str | Path, *, writes: bool = True) -> None:
        self.path, self.writes = Path(path), writes
        self.notes: list[str] = []  # what could not be written and why; the console prints them at the end
        self._metrics: TextIO | None = None
        self._lock: TextIO | None = None
        self._identity: tuple[int, int] | None = None  # device and inode of the locked folder
        self.curves = Curves(self.path, self.notes)

    @classmethod
    def create(cls, root: str | Path, *, strategy: str, name: str | None = None) -> RunFolder:
        """Makes root/name, or root/<date>-<time>-<strategy>[-n]. Rank 0 calls it and tells the others the path.

        Raises UserError if the name is taken or the folder can't be made.
        """
        root = Path(root)
        if name is not None and (name != Path(name).name or name in ("", ".", "..")):
            raise UserError(f"run name {name!r} is not a plain folder name: leave out slashes (the parent is {root})")
        try:
            if not root.is_dir():
                root.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
            if name is not None:
                if not _begun_only(root / name):
                    (root / name).mkdir(DIRECTORY_MODE)
                for entry in (root / name).iterdir():
                    if _is_draft(entry.name):
                        entry.unlink()
                return cls(root / name)
            stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{re.sub(r'[^A-Za-z0-9_]+', '-', Path(strategy).stem)}"
            for number in range(1, 10_000):
                path = root / (stem if number == 1 else f"{stem}-{number}")
                try:
                    path.mkdir(DIRECTORY_MODE)
                except FileExistsError:
                    continue
                return cls(path)
        except FileExistsError:
            raise UserError(
                f"{root / (name or '')} exists already and is never overwritten: give another name"
            ) from None
        except OSError as error:
            raise UserError(f"the run folder can't be made in {root}: {error.strerror or error}") from None
        raise AssertionError(f"10,000 runs called {stem}")

    def find(self) -> None:
        """Raises UserError if the folder that rank 0 has made is not there on this rank's host."""
        end = time.monotonic() + FIND_S
        while not self.path.is_dir():
            if time.monotonic() > end:
                raise UserError(
                    f"the run folder {self.path} is not there on {socket.gethostname()}: put it on a disk that all "
                    "hosts share (--runs FOLDER)"
                )
            time.sleep(FIND_S / 100)

    def lock(self) -> None:
        """Until this process ends, nobody else may run in the folder. Raises UserError if somebody does."""
        if not self.writes:
            return
        self._lock = (self.path / ".lock").open("w")
        found = os.stat(self.path)
        self._identity = found.st_dev, found.st_ino
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.path} is in use: another run goes on in it; wait for its end, or end it") from None
        except OSError:  # a file system without locks
            pass

    def model(self, role: str) -> Path:
        """Where a trained model is saved."""
        return self.path / role

    def write_algorithm(self, source: str) -> None:
        """The page of an algorithm that does not come with the package."""
        self._write("algorithm.py", source)

    def write_config(self, config: Mapping[str, Any]) -> None:
        self._write_json(CONFIG, config)

    def write_strategy(self, source: str) -> None:
        self._write("strategy.py", source)

    def write_program(self, fingerprint: str, summary: str, *, strategy: str) -> None:
        """strategy: its name."""
        values = {"strategy": strategy, "fingerprint": fingerprint, "summary": summary.splitlines()}
        self._write_json("program.json", values)

    def write_cluster(self, text: str) -> None:
        self._write("cluster.toml", text)

    def texts(self) -> dict[str, str]:
        """The files that say what runs, by name; on rank 0."""
        names = ("config.json", "strategy.py", "program.json", "cluster.toml", "algorithm.py") if self.writes else ()
        return {name: (self.path / name).read_text() for name in names if (self.path / name).is_file()}

    def metrics(self, num_iterations: int) -> list[dict[str, Any]]:
        """What metrics.jsonl says of the first iterations."""
        rows, path = [], self.path / "metrics.jsonl"
        for line in path.read_text().splitlines() if path.is_file() else ():
            with suppress(ValueError):  # the last line of a run that was killed may be half a line
                rows.append(json.loads(line))
        wanted = range(num_iterations)
        return [row for row in rows if isinstance(row, dict) and row.get("iteration") in wanted]

    def keep_metrics(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Drops the metrics of all other iterations, which a resumed run does again."""
        self.curves.purge_step = len(rows)
        self._write("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def samples_before(self) -> list[tuple[str, float]]:
        """Response and reward before training of each sample, as an earlier part of this run wrote them."""
        path = self.path / "samples.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        return [(row["before"], row["reward_before"]) for row in rows]

    def write_metrics(
        self, iteration: int, metrics: Mapping[str, float | str], groups: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """One line of metrics.jsonl and one point of each curve, on disk when this returns. No NaN in JSON: null.
        groups: of the curves in TensorBoard, by metric."""
        if not self.writes:
            return
        with writing(self.path / "metrics.jsonl"):
            if self._metrics is None:
                self._metrics = (self.path / "metrics.jsonl").open("a")
            self.check()
            row = {"iteration": iteration} | {k: finite(v) for k, v in metrics.items()}
            self._metrics.write(json.dumps(row) + "\n")
            self._metrics.flush()
        values = {name: value for name, value in metrics.items() if not isinstance(value, str)}  # tokens_sha256
        with writing(self.path / EVENTS):
            self.curves.add(iteration, {f"{groups.get(name, 'other')}/{name}": value for name, value in values.items()})

    def write_samples(self, samples: Sequence[Sample]) -> None:
        """Replaces samples.jsonl and samples.txt: before training first, with the responses after it at the end."""
        rows = [{name: finite(value) for name, value in asdict(sample).items()} for sample in samples]
        self._write("samples.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        self._write("samples.txt", format_samples(samples))

    def write_timeline(
        self, records: Sequence[Mapping[str, object]], *, title: str, workflow: Workflow, about: Mapping = {}
    ) -> None:
        """timeline.json with all that was recorded, timeline.png with the last iterations. See trace.py."""
        if not self.writes:
            return
        with writing(self.path / "timeline.json"):
            write_chrome(self.path / "timeline.json", records, about={"title": title, **about})
        try:
            with writing(self.path / "timeline.png"):
                path = self.path / "timeline.png"
                write_png(path, records, title=title, workflow=workflow, num_iterations=PNG_ITERATIONS)
        except ImportError as error:
            self.notes.append(
                f"no timeline.png, because matplotlib can't be imported ({error}): pip install matplotlib"
            )

    def check(self) -> None:
        """Raises UserError if this is no longer the folder that was locked, or lacks the metrics: files that are open
        can be written all the same, and what is written is lost."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            raise gone(self.path) from None
        replaced = self._identity is not None and (found.st_dev, found.st_ino) != self._identity
        if replaced or (self._metrics is not None and os.fstat(self._metrics.fileno()).st_nlink == 0):
            raise gone(self.path)

    def close(self) -> None:
        """Closes the files that stay open during a run."""
        if self._metrics is not None:
            self._metrics.close()
        self._metrics = None
        self.curves.close()

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self._write(name, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")

    def _write(self, name: str, text: str) -> None:
        """Written beside and renamed, so that a killed run leaves the old file or the new one, never half of one."""
        if not self.writes:
            return
        temporary = self.path / f".{name}.{os.getpid()}"
        with writing(self.path / name):
            with temporary.open("w", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())  # a power failure, too, leaves one of the two
            temporary.replace(self.path / name)


def _begun_only(path: Path) -> bool:
    """Whether a run was killed here before its folder was that of a run, which config.json, the last to come, makes
    it."""
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else {CONFIG}
    return all(name in BEFORE_CONFIG or _is_draft(name) for name in names)


def _is_draft(name: str) -> bool:
    """Whether this is a file that `_write` has not renamed yet, of those that come before the end of the first one."""
    return name.startswith(tuple(f".{whole}." for whole in (CONFIG, *BEFORE_CONFIG)))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises UserError where a file of a run can't be written."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not path.parent.is_dir():
            raise gone(path.parent) from None
        raise UserError(
            f"{path} can't be written: {error.strerror or error}; make room there, and go on from the newest "
            "checkpoint (--resume)"
        ) from error


def finite(value: object) -> object:
    """JSON has no NaN and no infinity: null stands for them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_samples(samples: Iterable[Sample], width: int = 100) -> str:
    """Samples for people: prompt, response before, response after, each wrapped and with its reward.

    Line breaks and control characters are shown as escapes, because a model can emit any of them.
    """
    blocks = []
    for sample in samples:
        rows = [("prompt", "", sample.prompt), ("before", _signed(sample.reward_before), sample.before)]
        if sample.after is not None:
            rows.append(("after", _signed(sample.reward_after), sample.after))
        lines = [f"sample {sample.prompt_index}"]
        for label, reward, text in rows:
            wrapped = textwrap.wrap(printable(text), max(20, width - 21)) or ["(nothing)"]
            lines.append(f"  {label:<7}{reward:>8}  | {wrapped[0]}")
            lines += [f"  {'':<15}  | {line}" for line in wrapped[1:]]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _signed(reward: float | None) -> str:
    return "" if reward is None else f"{reward:+.3f}"


def printable(text: str) -> str:
    """Text that can't move a terminal's cursor or break a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
