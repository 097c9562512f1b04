"""The start of a run with data.precompute: logprobs that frozen models give all rows of its data sets, computed once
and written to the run folder, a file for each batch."""

import gc
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlhf_spmd.config.options import Config
from rlhf_spmd.files import progress
from rlhf_spmd.plan.calls import ModelCall
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.runtime.checkpoint.resume import PROGRAM, STARTED, Resumed, refuse_other_inputs
from rlhf_spmd.runtime.data.precomputed import folder_of_parts, has_all_parts, path_of_part, write_part
from rlhf_spmd.runtime.execute.executor import Executor
from rlhf_spmd.runtime.execute.iteration import ALL, Iteration, given_rows
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.execute.response_hashes import reported_columns
from rlhf_spmd.runtime.generation.kv_cache import release_unused
from rlhf_spmd.runtime.records.run_files import json_object
from rlhf_spmd.runtime.records.run_folder import RunFolder
from rlhf_spmd.runtime.run import recorded
from rlhf_spmd.runtime.run.prepare import prepare
from rlhf_spmd.runtime.world.trace import Tracer
from rlhf_spmd.runtime.world.world import World


def time_of(folder: str) -> str:
    """Returns the time that chat templates wrote into the rows of another run; empty: it is not known."""
    return str(json_object(Path(folder) / PROGRAM).get(STARTED, "")) if folder else ""


def phases_left(
    config: Config, world: World, phases: Sequence[tuple[Config, Program]], resumed: Resumed
) -> Sequence[tuple[Config, Program]]:
    """Returns the phases of a resume from a checkpoint: none if the run folder has all logprobs. Models are compared
    before, since logprobs of another model would be missing. Collective; raises UserError."""
    if not (config.data.precompute or config.data.precomputed_logprobs):
        return phases
    with world.together("comparing with the checkpoint"):
        refuse_other_inputs(recorded.model_inputs(config), resumed)
        has_all = has_all_parts(config.run_folder, len(phases))
    return () if world.bcast(has_all, what="whether logprobs are missing") else phases


def precompute_at_start(
    config: Config,
    program: Program,
    world: World,
    phases: Sequence[tuple[Config, Program]],
    origin: recorded.Origin,
    summary: str,
) -> tuple[RunFolder, Config]:
    """Computes what the run folder lacks, and frees the frozen models -> the folder, and the options with it. Before,
    it writes the description of a run without a checkpoint, so that this can be resumed from here on. Collective;
    raises UserError."""
    folder = None
    for options, phase in phases:
        prepared = prepare(replace(options, started=config.started), phase, world)
        job = prepared.job
        config = replace(config, started=job.config.started)
        if folder is None:
            folder = recorded.open_folder(job, origin)
            if origin.resumed is None or origin.resumed.checkpoint is None:
                described = replace(job.config, data=config.data)  # with the iterations that data.epochs are
                of_run = replace(prepared, job=replace(job, config=described, program=program))
                recorded.describe(of_run, folder, origin, summary, [])
                del of_run
            config = replace(config, run_folder=str(folder.path))
        precompute(job, config.run_folder)
        job.close()
        del prepared, job
        gc.collect()
        release_unused(world.device)
    assert folder is not None, "there is a data set"
    return folder, config


def precompute(job: Job, folder: str) -> None:
    """Runs the program of precompute_program over the rows that the run folder has no numbers of; rank 0 writes them.
    Collective; raises UserError."""
    world, workload = job.world, job.workload
    executor = Executor(job, Tracer(world.rank, world.hosts[world.rank]))
    parts = folder_of_parts(folder, job.config, job.prompts, job.known)
    num_parts = math.ceil(len(job.prompts) / workload.mini_batch)
    for number in range(num_parts):
        path = path_of_part(parts, number, num_parts)
        if world.bcast(path.is_file(), what="whether the logprobs of a batch are there"):
            continue
        data = _batch(job, number)
        executor.iteration(data)
        values = {call.outputs[0]: _numbers(job, call, data) for call in workload.workflow.placed_calls}
        with world.together("writing logprobs"):
            if world.rank == 0:
                write_part(path, values)
        num_done = min(len(job.prompts), (number + 1) * workload.mini_batch)
        progress.say(f"logprobs of {num_done:,} of {len(job.prompts):,} rows")


def _batch(job: Job, number: int) -> Iteration:
    """Returns the next rows in the order of the files. The last batch is filled up with the last row."""
    workload = job.workload
    first = number * workload.mini_batch
    prompt_MC = np.minimum(np.arange(first, first + workload.mini_batch), len(job.prompts) - 1)[None]
    store = given_rows(workload, job.prompts, job.columns, prompt_MC, job.world.device)
    return Iteration.of_rows(job.config.seed, number, prompt_MC, store, what="batch")


def _numbers(job: Job, call: ModelCall, data: Iteration) -> np.ndarray:
    """Returns the numbers of all rows of a batch, without those that fill it up, on rank 0. Collective."""
    world, program, key = job.world, job.program, call.outputs[0]
    width, responses = program.workload.max_response, job.prompts.responses[call.responses[0]]
    columns, message = reported_columns(program, call, world.rank), b""
    if columns.start < columns.stop:
        message = data.store.at(key, (ALL, columns))[0].float().cpu().numpy().tobytes()
    messages = world.allgather_bytes(message, f"{key} of a batch")
    numbers_CG = np.zeros((program.workload.mini_batch, width), np.float32)
    for rank, message in enumerate(messages):
        if message:
            numbers_CG[reported_columns(program, call, rank)] = np.frombuffer(message, np.float32).reshape(-1, width)
    first = data.number * len(numbers_CG)
    rows = range(first, min(len(job.prompts), first + len(numbers_CG)))
    return np.concatenate([numbers_CG[index - first, : len(responses.row(index))] for index in rows])
