"""Checkpoints while a run goes on: training waits for a copy in host memory, a thread of every rank does the disk.

Each rank that trains writes its own file. Rank 0 writes the small ones, waits for the others' (their records in the
folder say that they are there), and makes it a checkpoint. What goes wrong in a thread is raised by the next `check`.
"""

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_spmd.runtime.checkpoint import store as files
from rlhf_spmd.runtime.checkpoint.train_state import collect, write_tensors
from rlhf_spmd.runtime.guard.watch import LONGEST_WAIT
from rlhf_spmd.runtime.weights.rank_models import RankModels
from rlhf_spmd.runtime.world.world import World


class Saver:
    """Writes the checkpoints of one run. All ranks call `save` after the same iterations, and `finish` at the end."""

    def __init__(self, world: World, models: RankModels, run: Path, *, every: int, keep: int, texts: Mapping[str, str]):
        """run: the run folder. every: iterations between checkpoints, 0: none but those asked for. texts: small files
        that belong into each of them."""
        self.world, self.models, self.run, self.root = world, models, run, run / "checkpoints"
        self.every, self.keep, self.texts = every, keep, dict(texts)
        self.writers = [rank for rank in range(world.size) if models.program.trained(rank)]
        self.last: int | None = None  # iterations done at the last `save`
        self._thread: threading.Thread | None = None
        self._mine_written = threading.Event()
        self._error: Exception | None = None

    def is_due(self, iteration: int) -> bool:
        """Whether a checkpoint belongs after so many iterations."""
        return self.every > 0 and iteration % self.every == 0

    def save(self, iteration: int, state: Mapping[str, Any]) -> None:
        """A checkpoint after so many iterations. Copies what trains on this rank, and returns; but waits first while
        the checkpoint before is still being written."""
        if self._thread is not None:
            self._thread.join()
        self.check()
        tensors, about = collect(self.models)
        self.last = iteration
        self._mine_written.clear()
        arguments = (iteration, tensors, about, dict(state))
        self._thread = threading.Thread(target=self._guarded, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises what went wrong in this rank's thread."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Returns when what was saved is a checkpoint. Collective; raises UserError on all ranks."""
        if self.last is None:
            return
        with self.world.together("writing the checkpoint"):
            self._mine_written.wait()
            self.check()
        with self.world.together("finishing the checkpoint"):
            self._thread.join()
            self.check()

    # ---- in the thread ----------------------------------------------------------------------------------------------

    def _guarded(self, *arguments) -> None:
        try:
            self._write(*arguments)
        except Exception as error:  # whatever it is, the main thread tells it
            self._error = files.unwritable(self.root, error) if isinstance(error, OSError) else error
            if not self.run.is_dir():
                self._error = files.gone(self.run)
        finally:
            self._mine_written.set()

    def _write(self, iteration: int, tensors: Mapping, about: Mapping[str, str], state: Mapping[str, Any]) -> None:
        rank, draft = self.world.rank, files.make_draft(self.root, iteration)
        written = {}
        if rank in self.writers:
            name = files.rank_file(rank)
            written[name] = write_tensors(draft / name, tensors, about)
            if rank > 0:
                files.say_written(draft, name, written[name])
        if rank > 0:
            return
        written[files.STATE] = files.write_json(draft / files.STATE, state)
        for name, text in self.texts.items():
            written[name] = files.write(draft / name, [text.encode(errors="backslashreplace")])
        self._mine_written.set()
        others = [files.rank_file(rank) for rank in self.writers if rank > 0]
        # one that can't write says so itself, one that dies ends the job: so it is only the disk that may be slow
        written |= files.wait_for(draft, others, deadline_s=LONGEST_WAIT * self.world.deadline_s)
        with suppress(FileNotFoundError):  # metrics of these iterations must not be lost while the weights are not
            descriptor = os.open(self.run / "metrics.jsonl", os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        files.commit(self.root, iteration, written)
        files.keep_newest(self.root, self.keep)
