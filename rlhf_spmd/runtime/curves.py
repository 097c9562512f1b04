"""A run's metrics as curves: for TensorBoard always, and on Weights & Biases if `wandb=PROJECT` asks for it.

Only rank 0 draws. metrics.jsonl (run_folder.py) is what counts: without TensorBoard a run goes on, and a resumed one
draws over what it does again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_spmd.errors import UserError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

WANDB_ID = "wandb_id"  # a file of the run folder, by which a resumed run finds its curves
START_S = 30.0  # a server that does not answer for so long is not there


class Curves:
    """Writes the curves of one run. notes: what could not be drawn and why."""

    def __init__(self, folder: Path, notes: list[str]):
        self.folder, self.notes = folder, notes
        self.purge_step: int | None = None  # from here on, TensorBoard forgets what it was told before
        self._tensorboard: SummaryWriter | None = None
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
        """One point of each curve; the names have their group in front: reward/kl."""
        if not self._started:
            self._tensorboard, self._started = self._open_tensorboard(), True
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, iteration)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(dict(values), step=iteration)

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._tensorboard = self._wandb = None

    def _open_tensorboard(self) -> SummaryWriter | None:
        # Imported with the first metrics and on rank 0 only: 0.1 to 0.2 s that no start-up waits for.
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            self.notes.append(f"no TensorBoard events, because it can't be imported ({error}): pip install tensorboard")
            return None
        return SummaryWriter(self.folder, purge_step=self.purge_step)
