"""The batch in flight in a checkpoint of a run that draws one iteration ahead.

It has been drawn when the checkpoint is written, and trains in the next iteration. Every key that a call before
training made is stored as columns of the whole matrix, each by the rank that reports it, so any layout can read them.
So are the sums and numbers that the calls noted for the log, which belong to the iteration that trains, and which
prompts it has if rounds have chosen them, and responses that go on.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from rlhf_spmd.plan.program.instructions import Run
from rlhf_spmd.runtime.checkpoint.checkpoint_files import DRAWN, Checkpoint, reading
from rlhf_spmd.runtime.execute.iteration import ALL, Iteration, given_rows
from rlhf_spmd.runtime.execute.job import Job

ROWS = "rows"  # where they are not those of the iteration's number: prompt and sample of each
BEGAN, CARRIED = "began", "carried "  # of responses that take several iterations; before the keys of their rows


def collect(job: Job, data: Iteration) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Collects what this rank stores of a batch that was drawn: tensors KEY:FIRST COLUMN, [mini-batches, columns, ...],
    copied to host memory, and facts."""
    program, rank = job.program, job.world.rank
    tensors = {}
    for run in program.instructions[rank]:
        if isinstance(run, Run) and not run.delay and program.layout_of(run).reports(rank):
            columns = program.columns_of(run, rank)
            for key in program.makes(run, rank) if columns else ():
                rows = data.store.at(key, (ALL, slice(columns.start, columns.stop)))
                tensors[f"{key}:{columns.start}"] = rows.detach().cpu().clone().contiguous()
    about: dict[str, Any] = {
        "meter": data.meter.to_message(),
        "noted": {name: rows.tolist() for name, rows in data.noted.items()},
        **{name: getattr(data, name) for name in ("generate_s", "num_bytes_sent", "num_messages_sent", "lag")},
    }
    if data.rounds is not None:
        about[ROWS] = data.prompt_MC.tolist(), data.sample_MC.tolist()
    if (carried := data.carried) is not None:
        about[BEGAN] = carried.began_MC.tolist(), carried.goes_on_MC.tolist()
        for name in [name for name in tensors if name.partition(":")[0] in carried.rows]:
            tensors[CARRIED + name] = carried.rows[name.partition(":")[0]].cpu().clone().contiguous()
    return tensors, {name: json.dumps(value) for name, value in about.items()}


def restore(job: Job, checkpoint: Checkpoint, data: Iteration) -> bool:
    """Restores the batch in flight of a checkpoint, whose files have been checked, and returns whether there is one.
    Raises UserError on all ranks. Collective.

    data: the iteration that trains it, still empty.
    """
    from safetensors import safe_open

    names = sorted(name for name in checkpoint.files if name.startswith(DRAWN))
    with job.world.together("reading the batch in flight"):
        for name in names:
            with reading(checkpoint.folder, name), safe_open(checkpoint.folder / name, framework="pt") as file:
                about = {key: json.loads(text) for key, text in file.metadata().items()}
                data.lag = about["lag"]
                if data.rounds is not None:
                    data.prompt_MC[:], data.sample_MC[:] = about[ROWS]
                    data.store |= given_rows(job.workload, job.prompts, job.columns, data.prompt_MC, job.world.device)
                    data.rounds.cursor = job.state.prompts_used
                if data.carried is not None:
                    data.carried.began_MC[:], data.carried.goes_on_MC[:] = about[BEGAN]
                for key in file.keys():  # noqa: SIM118 - a handle, not a dict
                    _place(data, key, file.get_tensor(key))
                rank = int(name.removeprefix(DRAWN).partition(".")[0])
                if job.world.rank == (rank if rank < job.world.size else 0):
                    _count(data, about)
    return bool(names)


def _place(data: Iteration, name: str, rows: Tensor) -> None:
    """Keeps the columns that this rank holds."""
    key, _, first = name.removeprefix(CARRIED).rpartition(":")
    store = data.carried.rows if data.carried is not None and name.startswith(CARRIED) else data.store
    start, stop = int(first), int(first) + rows.shape[1]
    for held in store.columns.get(key, ()):
        low, high = max(start, held.start), min(stop, held.stop)
        if low < high:
            store.at(key, (ALL, slice(low, high)))[:] = rows[:, low - start : high - start]


def _count(data: Iteration, about: Mapping[str, Any]) -> None:
    """Restores what a rank has counted."""
    data.meter.include(about["meter"])
    for name, values in about["noted"].items():
        rows_MC, here_MC = np.array(values, dtype=float), data.noted.get(name)
        data.noted[name] = rows_MC if here_MC is None else np.where(np.isnan(rows_MC), here_MC, rows_MC)
    data.generate_s += about["generate_s"]
    data.num_bytes_sent += about["num_bytes_sent"]
    data.num_messages_sent += about["num_messages_sent"]
