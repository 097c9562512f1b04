"""The batch in flight in a checkpoint of a run that draws one iteration ahead.

It has been drawn when the checkpoint is written, and trains in the next iteration. Every key that a call before
training made is stored as columns of the whole matrix, each by the rank that reports it, so any layout can read them.
So are the sums and numbers that the calls noted for the log, which belong to the iteration that trains.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from rlhf_spmd.plan.program.ahead import draws
from rlhf_spmd.plan.program.instructions import Run
from rlhf_spmd.runtime.checkpoint.checkpoint_files import DRAWN, Checkpoint, unusable
from rlhf_spmd.runtime.execute.iteration import ALL, Iteration
from rlhf_spmd.runtime.execute.job import Job


def collect(job: Job, data: Iteration) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Collects what this rank stores of a batch that was drawn: tensors KEY:FIRST COLUMN, [mini-batches, columns, ...],
    copied to host memory, and facts."""
    program, rank = job.program, job.world.rank
    tensors = {}
    for run in program.instructions[rank]:
        if isinstance(run, Run) and draws(program, run) and program.layout_of(run).reports(rank):
            columns = program.columns_of(run, rank)
            for key in program.makes(run, rank) if columns else ():
                rows = data.store.at(key, (ALL, slice(columns.start, columns.stop)))
                tensors[f"{key}:{columns.start}"] = rows.detach().cpu().clone().contiguous()
    about: dict[str, Any] = {
        "iteration": data.number,
        "meter": data.meter.to_message(),
        "sent": (data.num_bytes_sent, data.num_messages_sent),
        "lag": data.lag,
    }
    about |= {"generate_s": data.generate_s, "noted": {name: rows.tolist() for name, rows in data.noted.items()}}
    return tensors, {name: json.dumps(value) for name, value in about.items()}


def restore(job: Job, checkpoint: Checkpoint, data: Iteration) -> bool:
    """Restores the batch in flight of a checkpoint, whose files have been checked, and returns whether there is one.
    Raises UserError on all ranks. Collective.

    data: the iteration that trains it, still empty.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(name for name in checkpoint.files if name.startswith(DRAWN))
    if not files:
        return False
    number = data.number
    with job.world.together("reading the batch in flight"):
        for name in files:
            path = checkpoint.folder / name
            try:
                with safe_open(path, framework="pt") as file:
                    about = {key: json.loads(text) for key, text in (file.metadata() or {}).items()}
                    if about["iteration"] != number:
                        raise ValueError(f"it is of iteration {about['iteration'] + 1}, not {number + 1}")
                    data.lag = about["lag"]
                    for key in file.keys():  # noqa: SIM118 - a handle, not a dict
                        _place(job, data, key, file.get_tensor(key))
                _count(job, data, int(name.removeprefix(DRAWN).partition(".")[0]), about)
            except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
                raise unusable(checkpoint.folder, f"{path} can't be read ({type(error).__name__}: {error})") from None
    return True


def _place(job: Job, data: Iteration, name: str, rows: Tensor) -> None:
    """Keeps the columns that this rank holds."""
    key, _, first = name.rpartition(":")
    start, stop = int(first), int(first) + rows.shape[1]
    for held in job.columns.get(key, ()):
        low, high = max(start, held.start), min(stop, held.stop)
        if low < high:
            data.store.at(key, (ALL, slice(low, high)))[:] = rows[:, low - start : high - start]


def _count(job: Job, data: Iteration, rank: int, about: Mapping[str, Any]) -> None:
    """Restores what a rank has counted, on that rank or, if this run has fewer, on the first one."""
    if job.world.rank != (rank if rank < job.world.size else 0):
        return
    for name, (total, weight) in about["meter"]["sums"].items():
        data.meter.add(name, total, weight)
    for name, value in about["meter"]["maxima"].items():
        data.meter.maximum(name, value)
    for name, value in about["meter"]["minima"].items():
        data.meter.minimum(name, value)
    for name, values in about["noted"].items():
        rows_MC, mine_MC = np.array(values, dtype=float), data.noted.get(name)
        data.noted[name] = rows_MC if mine_MC is None else np.where(np.isnan(rows_MC), mine_MC, rows_MC)
    data.generate_s += about["generate_s"]
    num_bytes, num_messages = about["sent"]
    data.num_bytes_sent += num_bytes
    data.num_messages_sent += num_messages
