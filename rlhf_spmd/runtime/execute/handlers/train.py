"""Calls that train: the rows of a global mini-batch, and the learning rate of its optimizer step."""

from functools import partial

import torch

from rlhf_spmd.algorithms.controllers import learning_rate
from rlhf_spmd.plan.program.instructions import Run
from rlhf_spmd.plan.workflow import Call
from rlhf_spmd.runtime.execute.handlers.context import CallContext, RunState
from rlhf_spmd.runtime.execute.iteration import ALL, Iteration
from rlhf_spmd.runtime.execute.optimizer_step import Step, Training
from rlhf_spmd.runtime.execute.pipeline_runtime import Passes


def begin(
    context: CallContext, training: Training, call: Call, step: Run, data: Iteration, state: RunState
) -> Step | None:
    """Begins an optimizer step on a global mini-batch; None if the model's steps have been stopped early, or if there
    is no row to learn from."""
    number = state.steps.get(call.model, 0)
    state.steps[call.model] = number + 1
    if call.model in data.stopped:
        return None
    layout = context.layout(call)
    _, columns = context.place(step)
    source_B = data.source_EMC[step.epoch, step.mini_batch, columns]
    places = (source_B, torch.arange(len(source_B), device=source_B.device))
    keys = context.program.reads(step, context.world.rank)
    begun = training.begin(
        step,
        call,
        layout,
        context.models.engines[call.model],
        {key: context.held(data, key, (ALL, columns))[places] for key in keys},
        numbers=context.config.algorithm.numbers(context.config.options, state.of_algorithm),
        rate=rate_of(context, call.model, number),
        micro_batch=context.micro_batch(layout),
        mini_batch=context.workload.mini_batch,
        meter=data.meter,
        group=context.group(step),
    )
    if begun.divisor:
        return begun
    training.leave_out(begun)
    return None


def passes(context: CallContext, training: Training, begun: Step, data: Iteration) -> Passes:
    """The forwards and backwards of a step with stages (1F1B); `close` updates the weights."""
    call = begun.call
    keys = (call.prompts,) * len(call.responses) + call.responses

    def num_tokens(index: int) -> int:
        return sum(int((begun.micro_batches[index][key] >= 0).sum()) for key in keys)

    def update() -> None:
        training.update(begun)
        end(context, training, begun, data)

    begun.engine.begin()
    forward, backward = partial(training.forward, begun), partial(training.backward, begun)
    return Passes(begun.engine.model, len(begun.micro_batches), num_tokens, forward, update, backward)


def end(context: CallContext, training: Training, begun: Step, data: Iteration) -> None:
    """Notes whether this was the model's last step of the iteration."""
    if training.should_stop(begun, group=context.group(begun.run), device=context.world.device):
        data.stopped.add(begun.call.model)


def rate_of(context: CallContext, model: str, step: int) -> float:
    """The learning rate of a model's optimizer step."""
    optimizer, workload = context.config.optimizer, context.workload
    return learning_rate(
        step,
        peak=optimizer.lr[model],
        num_warmup_steps=optimizer.warmup_steps,
        num_steps=context.config.iterations * workload.epochs * workload.num_mini_batches,
        decay=optimizer.schedule,
    )
