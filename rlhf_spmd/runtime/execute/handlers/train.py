"""Calls that train: the rows of a global mini-batch, and the learning rate of its optimizer step."""

from functools import partial

import torch

from rlhf_spmd.algorithms.controllers import learning_rate
from rlhf_spmd.plan.program.instructions import Run
from rlhf_spmd.plan.workflow import Train
from rlhf_spmd.runtime.execute import optimizer_step
from rlhf_spmd.runtime.execute.iteration import ALL, Iteration
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.execute.pipeline_runtime import Passes


def begin(job: Job, call: Train, run: Run, data: Iteration) -> Passes | None:
    """The forwards and backwards of an optimizer step on a global mini-batch (1F1B); `close` updates the weights. None
    if the model's steps have been stopped early, or if there is no row to learn from."""
    number = job.state.steps.get(call.model, 0)
    job.state.steps[call.model] = number + 1
    if call.model in data.stopped:
        return None
    _, columns = job.place(run)
    source_B = data.source_EMC[run.epoch, run.mini_batch, columns]
    places = (source_B, torch.arange(len(source_B), device=source_B.device))
    keys = job.program.reads(run, job.world.rank)
    rows = {key: job.held(data, key, (ALL, columns))[places] for key in keys}
    engine, rate = job.models.engines[call.model], rate_of(job, call.model, number)
    step = optimizer_step.begin(job, call, run, engine, rows, rate=rate, meter=data.meter)
    if not step.divisor:
        optimizer_step.log(job, step, 0.0)
        return None
    tokens = (call.prompts,) * len(call.responses) + call.responses

    def num_tokens(index: int) -> int:
        return sum(int((step.micro_batches[index][key] >= 0).sum()) for key in tokens)

    def update() -> None:
        """The optimizer's part of the step, and whether it was the model's last one of the iteration."""
        optimizer_step.log(job, step, engine.update(lr=rate))
        if optimizer_step.should_stop(job, step):
            data.stopped.add(call.model)

    engine.begin()
    forward, backward = partial(optimizer_step.forward, job, step), partial(optimizer_step.backward, step)
    return Passes(engine.model, len(step.micro_batches), num_tokens, forward, update, backward)


def rate_of(job: Job, model: str, step: int) -> float:
    """The learning rate of a model's optimizer step."""
    optimizer, workload = job.config.optimizer, job.workload
    return learning_rate(
        step,
        peak=optimizer.lr[model],
        num_warmup_steps=optimizer.warmup_steps,
        num_steps=job.config.iterations * workload.epochs * workload.num_mini_batches,
        decay=optimizer.schedule,
    )
