"""A run's metrics as curves: for TensorBoard always, and on Weights & Biases if `wandb=PROJECT` asks for it.

Only rank 0 draws. metrics.jsonl (run_folder.py) is what counts: without TensorBoard a run goes on, and a resumed one
draws over what it does again.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError

WANDB_ID = "wandb_id"  # a file of the run folder, by which a resumed run finds its curves
EVENTS = "events.out.tfevents"  # how TensorBoard knows its files
NUMBERS = itertools.count()  # of this process's files of events
START_S = 30.0  # a server that does not answer for so long is not there


class Curves:
    """Writes the curves of one run. notes: what could not be drawn and why."""

    def __init__(self, folder: Path, notes: list[str]):
        self.folder, self.notes = folder, notes
        self.purge_step: int | None = None  # from here on, TensorBoard forgets what it was told before
        self._tensorboard: Events | None = None
        self._started = False
        self._wandb: Any = None

    def start_wandb(self, project: str, config: Mapping[str, Any]) -> str:
        """Starts or resumes the run at Weights & Biases, or in the run folder with WANDB_MODE=offline; returns where it
        can be seen. Raises UserError."""
        try:
            import wandb
        except ImportError as error:
            raise UserError(f"wandb={project} needs the package wandb ({error}): pip install wandb") from None
        path = self.folder / WANDB_ID
        new = hashlib.sha256(f"{self.folder.absolute()} {time.time()}".encode()).hexdigest()[:16]
        name = path.read_text() if path.exists() else new
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
            )
        except wandb.errors.Error as error:
            text = f"wandb={project}: Weights & Biases can't be used ({str(error).strip()})"
            raise UserError(f"{text}; run `wandb login`, or set WANDB_MODE=offline") from None
        path.write_text(name)
        return self._wandb.dir if self._wandb.offline else self._wandb.url

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        """One point of each curve; the names have their group in front: reward/kl. Raises OSError."""
        if not self._started:
            self._tensorboard, self._started = self._open_tensorboard(), True
        if self._tensorboard is not None:
            self._tensorboard.add(iteration, values)
        if self._wandb is not None:
            self._wandb.log(dict(values), step=iteration)

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._tensorboard = self._wandb = None

    def _open_tensorboard(self) -> Events | None:
        try:
            return Events(self.folder, self.purge_step)
        except ImportError as error:
            self.notes.append(f"no TensorBoard events, because it can't be imported ({error}): pip install tensorboard")
            return None


class Events:
    """A file of TensorBoard events, each on the disk when `add` returns. TensorBoard's own writer has a thread, which
    nobody can ask what went wrong, and opens the file anew for every event."""

    def __init__(self, folder: Path, purge_step: int | None):
        """purge_step: TensorBoard forgets what other files of the folder say of this step and later ones."""
        # Imported with the first metrics and on rank 0 only: 0.1 s that no start-up waits for.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        name = f"{EVENTS}.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(NUMBERS)}"
        self._file = RecordWriter((folder / name).open("xb"))
        self._write(Event(file_version="brain.Event:2"))
        if purge_step is not None:
            self._write(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """One point of each curve. Raises OSError."""
        points = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(self._event(step=step, summary=self._summary(value=points)))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._file.write(event.SerializeToString())
        self._file.flush()
