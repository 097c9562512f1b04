"""Writes a run's metrics for TensorBoard, and for Weights & Biases if `wandb=PROJECT` is set. On rank 0 only.

metrics.jsonl (run_folder.py) is the record of a run: a run whose curves can't be written continues without them, and a
resumed run overwrites the points of iterations that it repeats.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError

WANDB_ID = "wandb_id"  # a file of the run folder with the id by which a resumed run finds its curves
EVENTS = "events.out.tfevents"  # TensorBoard reads files with this prefix
NUMBERS = itertools.count()  # of this process's event files
START_S = 30.0  # timeout of the server


class Curves:
    """Writes the curves of one run. notes: receives what could not be written and why."""

    def __init__(self, folder: Path, notes: list[str]):
        self.folder, self.notes = folder, notes
        self.purge_step: int | None = None  # TensorBoard drops earlier points of this step and later ones
        self._tensorboard: Events | None = None
        self._started = False
        self._wandb: Any = None

    def start_wandb(
        self, project: str, config: Mapping[str, Any], *, entity: str = "", group: str = "", tags: Sequence[str] = ()
    ) -> str:
        """Starts or resumes the run at Weights & Biases, once -> its address; offline, its folder. Raises UserError."""
        if self._wandb is not None:
            return ""
        try:
            import wandb
        except ImportError as error:
            raise UserError(f"wandb={project} needs the package wandb ({error}): pip install wandb") from None
        path = self.folder / WANDB_ID
        new = hashlib.sha256(f"{self.folder.absolute()} {time.time()}".encode()).hexdigest()[:16]
        name = path.read_text(encoding="utf-8") if path.exists() else new
        settings = wandb.Settings(console="off", silent=True, init_timeout=START_S)
        try:
            self._wandb = wandb.init(
                project=project,
                dir=self.folder,
                name=self.folder.name,
                id=name,
                resume="allow",
                config=dict(config),
                settings=settings,
                entity=entity or None,
                group=group or None,
                tags=list(tags) or None,
            )
        except wandb.errors.Error as error:
            text = f"wandb={project}: Weights & Biases can't be used ({str(error).strip()})"
            raise UserError(f"{text}; run `wandb login`, or set WANDB_MODE=offline") from None
        path.write_text(name, encoding="utf-8")
        return self._wandb.dir if self._wandb.offline else self._wandb.url

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve. values: by group/metric, such as reward/kl. After an error the run goes on
        without these curves."""
        values = {name.encode(errors="backslashreplace").decode(): value for name, value in values.items()}
        try:
            if not self._started:
                self._started, self._tensorboard = True, self._open_tensorboard()
            if self._tensorboard is not None:
                self._tensorboard.add(iteration, values)
        except OSError as error:
            path = error.filename or (self._tensorboard.path if self._tensorboard else self.folder)
            why = f"{path} can't be written: {error.strerror or error}"
            self.notes.append(f"no TensorBoard events since iteration {iteration + 1}, because {why}")
            self._close_tensorboard()
        try:
            if self._wandb is not None:
                self._wandb.log(dict(values), step=iteration)
        except Exception as error:  # of many kinds
            self._without_wandb(f"since iteration {iteration + 1}", error)

    def close(self) -> None:
        self._close_tensorboard()
        try:
            if self._wandb is not None:
                self._wandb.finish()
        except Exception as error:
            self._without_wandb("of the last iterations, perhaps", error)
        self._wandb = None

    def _close_tensorboard(self) -> None:
        if self._tensorboard is not None:
            with suppress(OSError):  # every event is on the disk, or has been reported
                self._tensorboard.close()
        self._tensorboard = None

    def _without_wandb(self, which: str, error: Exception) -> None:
        self.notes.append(f"nothing at Weights & Biases {which}: {type(error).__name__}: {error}")
        self._wandb = None

    def _open_tensorboard(self) -> Events | None:
        try:
            return Events(self.folder, self.purge_step)
        except ImportError as error:
            self.notes.append(f"no TensorBoard events, because it can't be imported ({error}): pip install tensorboard")
            return None


class Events:
    """A file of TensorBoard events, each on the disk when `add` returns. TensorBoard's own writer does not report the
    errors of its thread, and reopens the file for every event."""

    def __init__(self, folder: Path, purge_step: int | None):
        """purge_step: TensorBoard drops the points of this step and later ones in other files of the folder."""
        # Imported with the first metrics, on rank 0 only, because it takes 0.1 s.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        name = f"{EVENTS}.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(NUMBERS)}"
        self.path = folder / name
        self._file = RecordWriter(self.path.open("xb"))
        self._write(Event(file_version="brain.Event:2"))
        if purge_step is not None:
            self._write(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve. Raises OSError."""
        points = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(self._event(step=step, summary=self._summary(value=points)))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._file.write(event.SerializeToString())
        self._file.flush()
