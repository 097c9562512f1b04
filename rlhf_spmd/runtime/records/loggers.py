"""Writes a run's metrics for TensorBoard, and for Weights & Biases, MLflow and trackio if they are set. On rank 0 only.

metrics.jsonl (run_folder.py) is the record of a run: a run whose curves can't be written continues without them, and a
resumed run overwrites the points of iterations that it repeats.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlhf_spmd.config.options import Config
from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.records.mlflow_curves import MLFLOW_ID, Mlflow
from rlhf_spmd.runtime.records.trackio_curves import TRACKIO_ID, Trackio

WANDB_ID = "wandb_id"  # a file of the run folder with the id by which a resumed run finds its curves
TRACKED = (WANDB_ID, MLFLOW_ID, TRACKIO_ID)
START_S = 30.0  # timeout of the server


class Writer(Protocol):
    """Writes the points of curves."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve."""

    def close(self) -> None:
        """Finishes the curves."""


class Curves:
    """Writes the curves of one run. notes: receives what could not be written and why."""

    def __init__(self, folder: Path, notes: list[str]):
        self.folder, self.notes = folder, notes
        self.purge_step: int | None = None  # TensorBoard drops earlier points of this step and later ones
        self._writers: dict[str, Writer] = {"TensorBoard": TensorBoard(self)}

    def start_trackers(self, config: Config, options: Mapping[str, Any]) -> list[str]:
        """Starts or resumes the run at each tracker that is set, once. Returns where it is there. Raises UserError."""
        trackers: dict[str, tuple[str, Any]] = {
            "Weights & Biases": (config.wandb, Wandb),
            "MLflow": (config.mlflow, Mlflow),
            "trackio": (config.trackio, Trackio),
        }
        places = []
        for name, (project, make) in trackers.items():
            if project and name not in self._writers:
                self._writers[name] = writer = make(self.folder, config, options)
                places.append(f"{name}: {writer.place}")
        return places

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve. values: by group/metric, such as reward/kl. After an error the run goes on
        without these curves."""
        values = {name.encode(errors="backslashreplace").decode(): value for name, value in values.items()}
        for name, writer in [*self._writers.items()]:
            self._try(name, f"since iteration {iteration + 1}", partial(writer.add, iteration, values))

    def close(self) -> None:
        for name, writer in [*self._writers.items()]:
            self._try(name, "of the last iterations, perhaps", writer.close)
        self._writers.clear()

    def _try(self, name: str, points: str, write: Callable[[], None]) -> None:
        """Writes points; if that fails, notes it, and goes on without this writer."""
        try:
            write()
        except Exception as error:  # of many kinds: a full disk, a service that has gone
            self.notes.append(f"no curves for {name} {points}: {type(error).__name__}: {error}")
            del self._writers[name]


class Wandb:
    """A run at Weights & Biases."""

    def __init__(self, folder: Path, config: Config, options: Mapping[str, Any]):
        """config: names project, team, group and tags. options: are shown there. Raises UserError."""
        try:
            import wandb
        except ImportError as error:
            raise UserError(f"wandb={config.wandb} needs the package wandb ({error}): pip install wandb") from None
        path, logging = folder / WANDB_ID, config.logging
        new = hashlib.sha256(f"{folder.absolute()} {time.time()}".encode()).hexdigest()[:16]
        name = path.read_text(encoding="utf-8") if path.exists() else new
        try:
            self.run = wandb.init(
                project=config.wandb,
                dir=folder,
                name=folder.name,
                id=name,
                resume="allow",
                config=dict(options),
                settings=wandb.Settings(console="off", silent=True, init_timeout=START_S),
                entity=logging.entity or None,
                group=logging.group or None,
                tags=list(logging.tags) or None,
            )
        except wandb.errors.Error as error:
            text = f"wandb={config.wandb}: Weights & Biases can't be used ({str(error).strip()})"
            raise UserError(f"{text}; run `wandb login`, or set WANDB_MODE=offline") from None
        path.write_text(name, encoding="utf-8")

    @property
    def place(self) -> str:
        """The address of the run; offline, its folder."""
        return str(self.run.dir if self.run.offline else self.run.url)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """A file of TensorBoard events, each on the disk when `add` returns; the first one makes the file."""

    def __init__(self, curves: Curves):
        self.curves = curves
        self._writer: Any = None

    def add(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # late, because it takes half a second

            shown = threading.excepthook
            threading.excepthook = lambda hooked: None if _is_tensorboards(hooked.thread) else shown(hooked)
            self._writer = SummaryWriter(str(self.curves.folder), purge_step=self.curves.purge_step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _is_tensorboards(thread: threading.Thread | None) -> bool:
    """Returns whether it is the thread of TensorBoard that writes, whose error `add` or `close` raises again."""
    return type(thread).__module__.startswith("tensorboard.")
