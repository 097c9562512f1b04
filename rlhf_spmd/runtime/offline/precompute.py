"""The precompute subcommand on the ranks: logprobs that frozen models give all rows of the data set, written to a
file."""

import math
import time
from pathlib import Path

import numpy as np
import torch

from rlhf_spmd.config.options import Config
from rlhf_spmd.errors import UserError
from rlhf_spmd.files import progress
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.workflow import ModelCall
from rlhf_spmd.runtime.data.precomputed import TIME, about, write_logprobs
from rlhf_spmd.runtime.execute.executor import Executor
from rlhf_spmd.runtime.execute.iteration import ALL, Iteration
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.execute.response_hashes import reported_columns
from rlhf_spmd.runtime.run.prepare import given_rows, prepare
from rlhf_spmd.runtime.world.trace import Tracer
from rlhf_spmd.runtime.world.world import World


def precompute(config: Config, program: Program, world: World, out: Path) -> dict:
    """Runs the program of precompute_program over all rows, and writes the file on rank 0 -> facts for the last line.
    Collective; raises UserError."""
    began, job = time.perf_counter(), prepare(config, program, world)
    for note in (*job.notes, *job.prompts.remarks) if world.rank == 0 else ():
        print(f"warning: {note}", flush=True)
    executor = Executor(job, Tracer(world.rank, world.hosts[world.rank]))
    calls, at_once, num_rows = program.workload.workflow.placed_calls, program.workload.mini_batch, len(job.prompts)
    parts: dict[str, list[np.ndarray]] = {call.outputs[0]: [] for call in calls}
    num_batches = math.ceil(num_rows / at_once)
    for number in range(num_batches):
        data = _batch(job, number)
        executor.iteration(data)
        for call in calls:
            parts[call.outputs[0]] += _rows(job, call, data)
        done = min(num_rows, (number + 1) * at_once)
        progress.say(f"{done:,} of {num_rows:,} rows")  # on rank 0
    values = {key: np.concatenate(found) for key, found in parts.items() if found}
    with world.together("writing the logprobs"):
        if world.rank == 0:
            for key, found in values.items():
                if not np.isfinite(found).all():
                    raise UserError(
                        f"{key} of {config.data.prompts} has numbers that are not finite; look at the model"
                    )
            facts = about(config, job.prompts, job.known) | {TIME: job.config.started}
            write_logprobs(out, values, facts)
    tokens = {call.outputs[0]: int(job.prompts.responses[call.responses[0]].ends[-1]) for call in calls}
    return {"out": str(out), "rows": num_rows, "tokens": tokens, "seconds": time.perf_counter() - began}


def _batch(job: Job, number: int) -> Iteration:
    """Returns the next rows in the order of the files. The last batch is filled up with the last row."""
    workload = job.program.workload
    first = number * workload.mini_batch
    prompt_MC = np.minimum(np.arange(first, first + workload.mini_batch), len(job.prompts) - 1)[None]
    return Iteration(
        number,
        job.config.seed,
        prompt_MC=prompt_MC,
        sample_MC=np.zeros_like(prompt_MC),
        source_EMC=torch.zeros((1, *prompt_MC.shape), dtype=torch.int64),  # nothing trains
        store=given_rows(workload, job.prompts, job.columns, prompt_MC, job.world.device),
        what="batch",
    )


def _rows(job: Job, call: ModelCall, data: Iteration) -> list[np.ndarray]:
    """Returns the numbers of each row of a batch, without those that fill it up; on rank 0. Collective."""
    world, program, key = job.world, job.program, call.outputs[0]
    columns = reported_columns(program, call, world.rank)
    mine = b""
    if columns.start < columns.stop:
        mine = data.store.at(key, (ALL, columns))[0].float().cpu().numpy().tobytes()
    said = world.allgather_bytes(mine, f"{key} of a batch")
    if world.rank > 0:
        return []
    width, responses = program.workload.max_response, job.prompts.responses[call.responses[0]]
    whole_CG = np.zeros((program.workload.mini_batch, width), np.float32)
    for rank, numbers in enumerate(said):
        if numbers:
            whole_CG[reported_columns(program, call, rank)] = np.frombuffer(numbers, np.float32).reshape(-1, width)
    rows = range(data.number * len(whole_CG), min(len(job.prompts), (data.number + 1) * len(whole_CG)))
    return [row_G[: len(responses.row(index))].copy() for row_G, index in zip(whole_CG, rows, strict=False)]
