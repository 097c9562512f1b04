"""Writes checkpoints during a run: training waits only for a copy in host memory, which a thread writes to the disk.

Each rank that trains writes its own file. Rank 0 writes the small files, waits for the records of the other ranks'
files, and completes the checkpoint. An error in a thread is raised by the next `check`.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_spmd.plan.program.ahead import drawn_by
from rlhf_spmd.runtime.checkpoint import checkpoint_files as files
from rlhf_spmd.runtime.checkpoint.train_state import collect, write_tensors
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.failure.watch import LONGEST_WAIT

Tensors = tuple[Mapping[str, Tensor], Mapping[str, str]]  # and facts about them, for write_tensors


class Saver:
    """Writes the checkpoints of one run. All ranks call `save` after the same iterations, and `finish` at the end."""

    def __init__(self, job: Job, folder: Path, texts: Mapping[str, str]):
        """folder: that of the run. texts: small files that are copied into each checkpoint."""
        self.job, self.world, self.folder, self.root = job, job.world, folder, folder / "checkpoints"
        self.texts = dict(texts)
        self.options = job.config.checkpoint
        self.writers = [rank for rank in range(job.world.size) if job.program.trained(rank)]
        self.drawers = [rank for rank in range(job.world.size) if drawn_by(job.program, rank)]
        self.last: int | None = None  # iterations done at the last `save`
        self._thread: threading.Thread | None = None
        self._mine_written = threading.Event()
        self._error: Exception | None = None

    def is_due(self, iteration: int) -> bool:
        """Returns whether a checkpoint is due after this many iterations."""
        return self.options.every > 0 and iteration % self.options.every == 0

    def save(
        self, iteration: int, state: Mapping[str, Any], best: int | None = None, in_flight: Tensors | None = None
    ) -> None:
        """Starts a checkpoint after this many iterations: copies this rank's share and returns. First waits until the
        previous checkpoint is written.

        best: the checkpoint that is kept beside the newest ones.
        in_flight: what this rank stores of the batch in flight; None: there is none.
        """
        if self._thread is not None:
            self._thread.join()
        self.check()
        rank = self.world.rank
        parts: dict[str, Tensors] = {}
        if rank in self.writers:
            parts[files.rank_file(rank)] = collect(self.job.models)
        others = [files.rank_file(other) for other in self.writers if other > 0]
        if in_flight is not None:
            parts |= {files.drawn_file(rank): in_flight} if rank in self.drawers else {}
            others += [files.drawn_file(other) for other in self.drawers if other > 0]
        self.last = iteration
        self._mine_written.clear()
        arguments = (iteration, parts, others, dict(state), best)
        self._thread = threading.Thread(target=self._guarded, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises the error of this rank's thread, if there was one."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Waits until the last checkpoint is complete. Collective; raises UserError on all ranks."""
        if self.last is None:
            return
        with self.world.together("writing the checkpoint"):
            self._mine_written.wait()
            self.check()
        with self.world.together("finishing the checkpoint"):
            assert self._thread is not None  # of the last `save`
            self._thread.join()
            self.check()

    # ---- in the thread ----------------------------------------------------------------------------------------------

    def _guarded(self, *arguments) -> None:
        try:
            self._write(*arguments)
        except Exception as error:  # the main thread reports it
            self._error = files.unwritable(self.root, error) if isinstance(error, OSError) else error
            if not self.folder.is_dir():
                self._error = files.gone(self.folder)
        finally:
            self._mine_written.set()

    def _write(
        self,
        iteration: int,
        parts: Mapping[str, Tensors],
        others: Sequence[str],
        state: Mapping[str, Any],
        best: int | None,
    ) -> None:
        """Writes a checkpoint.

        parts: this rank's files of tensors.
        others: names of those of all ranks but 0.
        """
        rank, draft = self.world.rank, files.make_draft(self.root, iteration)
        written = {}
        for name, part in parts.items():
            written[name] = write_tensors(draft / name, *part)
            if rank > 0:
                files.say_written(draft, name, written[name])
        if rank > 0:
            return
        written[files.STATE] = files.write_json(draft / files.STATE, state)
        for name, text in self.texts.items():
            written[name] = files.write(draft / name, [text.encode(errors="backslashreplace")])
        self._mine_written.set()
        # a rank that can't write reports it itself, and one that dies ends the job: only a slow disk is left
        written |= files.wait_for(draft, others, deadline_s=LONGEST_WAIT * self.world.deadline_s)
        files.sync(self.folder / "metrics.jsonl")  # these iterations' metrics must survive if their weights do
        files.commit(self.root, iteration, written)
        files.keep_newest(self.root, self.options.keep, best)
