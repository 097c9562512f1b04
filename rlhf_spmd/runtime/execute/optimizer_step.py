"""One optimizer step of one model on one global mini-batch, pass by pass; a layout without stages is a pipeline of one.

A step begins with one sum over all ranks of the call: counts and moments of the mini-batch, to which each row
contributes once, however many ranks hold it. If a budget of tokens cuts the rows, or if only some are trained on, the
ranks then agree on the largest number of micro-batches; ranks with fewer add blank ones, whose loss is 0. They agree
over torch, in the call's own group: a control message among all ranks would make the ranks that generate wait for those
that train.

A divisor of 0 says that no row is left. All ranks know it before the first forward, and leave the step out: neither
weights nor the optimizer's state move. Only the schedule of the learning rate counts it.
"""

# M mini-batches, C columns, B sequences of a micro-batch, G response tokens

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.algorithms.logprob_parity import parity
from rlhf_spmd.algorithms.masks import response_mask
from rlhf_spmd.config.options import Config
from rlhf_spmd.errors import UserError
from rlhf_spmd.model import sequences
from rlhf_spmd.model.sequences import Sequences
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.layout import Layout, cut
from rlhf_spmd.plan.program.instructions import Run
from rlhf_spmd.plan.runtime_words import GENERATOR_LOGPROBS, LOGPROBS, PLACES_USED, STEP_TOKENS, SUMS, TOKEN_SHAPES
from rlhf_spmd.plan.workflow import LossCall, Train
from rlhf_spmd.runtime.engines.train_engine import TrainEngine
from rlhf_spmd.runtime.execute.divisors import checked_divisor, divisor_of
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.execute.page_functions import called, loss_of
from rlhf_spmd.runtime.execute.readout import Rows, read_for_loss, row_lengths, sequences_of, stored_arguments
from rlhf_spmd.runtime.observe.metric_sums import Meter

# Limits in nats: of one token, and of the mean over many. In bfloat16 a logit between 16 and 32 has a last digit of
# 0.125, so rounding moves one token in a thousand by half a nat (bench/LOG.md); a fault moves the mean by nats.
PARITY_TOLERANCE = {"float32": 1e-4, "bfloat16": 2.0}
MEAN_TOLERANCE = {"bfloat16": 0.5}
LARGEST = sys.float_info.max
MEAN_TOKENS = 256  # the mean of fewer tokens is not checked


@dataclass(slots=True)
class Step:
    """One optimizer step under way on this rank."""

    run: Run
    call: Train
    layout: Layout
    engine: TrainEngine
    micro_batches: list[Rows]
    prepared: list[Rows]  # of each micro-batch: arguments of the loss made by its `_prepare`
    divisor: float  # of the global mini-batch's loss; 0: there is no row, and nothing is done
    numbers: dict[str, Any]  # options and state of the algorithm
    rate: float
    meter: Meter  # discarded if another rank reports the rows
    counted: Rows | None = None  # this rank's rows, if the step has a budget of tokens
    stats: list[Mapping[str, tuple[Any, Any]]] = field(default_factory=list)
    inputs: dict[int, Tensor] = field(default_factory=dict)  # of a stage's micro-batches between forward and backward
    outputs: dict[int, Tensor] = field(default_factory=dict)


def begin(job: Job, call: Train, run: Run, engine: TrainEngine, rows: Rows, *, rate: float, meter: Meter) -> Step:
    """Counts the rows of all ranks, and cuts those of this one. rows: this rank's part of the mini-batch. Collective
    over the Run's group."""
    layout, algorithm, function = job.layout(call), job.config.algorithm, job.functions[call.name]
    reports, numbers, group = layout.reports(job.world.rank), job.numbers, job.group(run)
    if call.only:
        is_used_B = rows[call.only] != 0
        rows = {key: value[is_used_B] for key, value in rows.items()}
    if job.config.mini_batch_tokens:
        is_used_B = rows[call.prompts][:, 0] >= 0
        rows = {key: value[is_used_B] for key, value in rows.items()}
    counted_rows = rows if reports else _no_rows(job, call, rows[call.prompts].device)
    counted = [divisor_of(call, counted_rows)]
    if function.sums is not None:
        given = stored_arguments(job, call, counted_rows) | numbers
        counted.append(called(algorithm, f"{call.function}_sums", function.sums, given))
    of_divisor, sums = summed(torch.cat(counted), group=group).tensor_split([len(counted[0])])
    divisor = checked_divisor(of_divisor.tolist(), call, algorithm.name)
    micro_batches: list[Rows] = []
    prepared: list[Rows] = []
    if divisor:
        made: Rows = {}
        # only the last stage has all of them
        if function.prepare is not None and all(key in rows for key in call.inputs):
            given = stored_arguments(job, call, rows) | numbers | {SUMS: sums, "divisor": of_divisor[0]}
            made = called(algorithm, f"{call.function}_prepare", function.prepare, given)
        micro_batches, prepared = _micro_batches(job, call, rows, made, group)
    meter, all_rows = meter if reports else Meter(), rows if job.config.mini_batch_tokens else None
    return Step(run, call, layout, engine, micro_batches, prepared, divisor, numbers, rate, meter, all_rows)


def _no_rows(job: Job, call: LossCall, device: torch.device) -> Rows:
    """Zero rows of every key that a call reads, for a rank whose rows another rank counts."""
    shapes, rows = job.workload.workflow.shapes, Rows()
    for key in call.inputs:
        dtype = torch.int32 if shapes[key] in TOKEN_SHAPES else torch.float32
        rows[key] = torch.empty(0, *job.workload.row_shape(key), dtype=dtype, device=device)
    return rows


def _micro_batches(
    job: Job, call: Train, rows: Rows, prepared: Rows, group: dist.ProcessGroup | None
) -> tuple[list[Rows], list[Rows]]:
    """Cuts rows and prepared arguments, into the same number of micro-batches on every rank of the layout."""
    layout = job.layout(call)
    micro_batch = job.micro_batch(layout)
    parts = cut(row_lengths(call, rows), layout, micro_batch)
    chunks, made = ([{key: value[part] for key, value in all_.items()} for part in parts] for all_ in (rows, prepared))
    if layout.tokens is None and not call.only and not job.config.mini_batch_tokens:
        # every rank knows the number of the rank with most rows
        num = math.ceil(math.ceil(job.workload.mini_batch / layout.dp) / micro_batch)
    else:
        most = torch.tensor(len(chunks), device=rows[call.prompts].device)
        if group is not None:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        num = int(most)
    while len(chunks) < num:
        blank, zeros = (
            {key: value.new_zeros(1, *value.shape[1:]) for key, value in all_.items()} for all_ in (rows, prepared)
        )
        blank[call.prompts][:, 1:] = -1
        for key in call.responses:
            blank[key][:] = -1
        chunks.append(blank)
        made.append(zeros)
    return chunks, made


# ---- passes ---------------------------------------------------------------------------------------------------------


def forward(job: Job, step: Step, index: int, received: Tensor | None) -> Tensor | None:
    """One micro-batch through this stage -> the input of the next stage. received: from the previous stage."""
    if received is not None:
        step.inputs[index] = received.requires_grad_(True)
    batch, is_last = sequences_of(step.call, step.micro_batches[index]), step.engine.model.parallel.is_last

    def through(model: Transformer) -> Tensor:
        """The output of this stage; of the last one the loss."""
        output = sequences.forward(model, batch, received)
        return _loss(job, step, model, batch, output, index) if is_last else output

    step.outputs[index] = output = step.engine.forward(through)
    return None if is_last else output.detach()


def backward(step: Step, index: int, received: Tensor | None) -> Tensor | None:
    """The backward pass of one micro-batch. received: the gradient of this stage's output -> that of its input."""
    step.engine.backward(step.outputs.pop(index), received, last=index == len(step.micro_batches) - 1)
    return step.inputs.pop(index).grad if index in step.inputs else None


def log(job: Job, step: Step, grad_norm: float) -> None:
    """Counts a step's sums. Raises UserError if the gradient was not finite."""
    if not math.isfinite(grad_norm):
        raise UserError(
            f"{step.call.name}: the gradient norm is {grad_norm} at epoch {step.run.epoch}, mini-batch "
            f"{step.run.mini_batch}; lower optimizer.{step.call.model}_lr or look at the data of this iteration"
        )
    for sums in step.stats:
        for name, (total, weight) in sums.items():
            step.meter.log(name, total, weight, job.config.algorithm.over(name))
    is_first = step.layout.dp_index(job.world.rank) == 0
    if step.counted is not None:
        lengths = row_lengths(step.call, step.counted)
        step.meter.add(PLACES_USED, len(lengths) / job.workload.mini_batch, is_first)
        step.meter.add(STEP_TOKENS, sum(lengths), is_first)
    if is_first:
        step.meter.add(f"{step.call.model}_grad_norm", grad_norm, 1)
        step.meter.add(f"{step.call.model}_lr", step.rate, 1)


def should_stop(job: Job, step: Step) -> bool:
    """Whether a mean of the step exceeds the call's limit, so that the model's other steps of the iteration are
    left out; the same on every rank of the layout. NaN exceeds any limit."""
    if step.call.stop is None:
        return False
    name, limit = step.call.stop
    device = job.world.device
    own = torch.zeros(2, dtype=torch.float64, device=device)  # the sum, and over how many
    for sums in step.stats if step.layout.reports(job.world.rank) else ():
        if name not in sums:
            known = ", ".join(sums) or "nothing"
            raise UserError(f"{step.call.function} has stop=({name!r}, ...), but returns only these sums: {known}")
        own += torch.stack([torch.as_tensor(part, dtype=own.dtype, device=device) for part in sums[name]])
    total, weight = summed(own, group=job.group(step.run)).tolist()
    return weight > 0 and not total / weight <= limit


# ---- losses ---------------------------------------------------------------------------------------------------------


def _loss(job: Job, step: Step, model: Transformer, batch: Sequences, output: Tensor, index: int) -> Tensor:
    """A micro-batch's share of the global loss, from the output of the last stage."""
    rows, call, algorithm = step.micro_batches[index], step.call, job.config.algorithm
    outputs, read = read_for_loss(job, call, model, batch, output, rows)
    given = stored_arguments(job, call, rows) | step.prepared[index] | read
    if call.drawn and step.run.epoch == 0 and step.run.mini_batch == 0:  # the weights are those that generated
        mask_BG = response_mask(rows[call.responses[0]])
        tokens, new_BG = rows[call.responses[0]], outputs[LOGPROBS].detach()
        parity_gate(job.config, rows[call.drawn], new_BG, mask_BG, tokens, step.meter, corrected=corrects(call))
    made = called(algorithm, call.function, job.functions[call.name].function, step.numbers | given)
    total, sums = loss_of(algorithm, call.function, made)
    step.stats.append(sums)
    return total / step.divisor


def parity_gate(
    config: Config,
    old_BG: Tensor,
    new_BG: Tensor,
    mask_BG: Tensor,
    responses_BG: Tensor,
    meter: Meter,
    *,
    corrected: bool = False,
) -> None:
    """Raises UserError unless both passes agree; called while the weights are still those that generated.
    corrected: the loss corrects differences, so only a limit that the user has set ends the run, or a logprob that
    is not a number."""
    limit = PARITY_TOLERANCE[config.dtype] if config.parity_tolerance is None else config.parity_tolerance
    found = parity(old_BG, new_BG, mask_BG)
    meter.add("parity_mean_abs", found.sum_abs, found.num_tokens)
    meter.maximum("parity_max_abs", found.max_abs)
    is_free = corrected and config.parity_tolerance is None
    if found.max_abs > (LARGEST if is_free else limit):
        token = int(responses_BG[found.row, found.position])
        fix = (
            f"the limit is parity_tolerance={limit:g}: raise it if this is rounding, use float32, "
            "or let the loss correct it (importance_weights or rejection of the algorithm)"
        )
        raise UserError(
            f"generation and training disagree: token {token} at position {found.position} has logprob "
            f"{float(old_BG[found.row, found.position]):.6f} from the generator and "
            f"{float(new_BG[found.row, found.position]):.6f} in training, {found.max_abs:.2e} nats apart; "
            + (fix if math.isfinite(found.max_abs) else "lower the learning rates, or look at the model")
        )
    mean_limit = MEAN_TOLERANCE.get(config.dtype, math.inf) if found.num_tokens >= MEAN_TOKENS else math.inf
    if found.mean_abs > mean_limit and not is_free and config.parity_tolerance is None:
        raise UserError(
            f"generation and training disagree by {found.mean_abs:.2e} nats per token in the mean of "
            f"{found.num_tokens:,} tokens, more than rounding gives (the limit is {mean_limit:g} in "
            f"{config.dtype}): use float32 to see whether it goes away, or set parity_tolerance, "
            "which is then the only limit"
        )


def corrects(call: LossCall) -> bool:
    """Whether the loss of a call gets the generator's logprobs beside the old ones, to correct the difference."""
    return (GENERATOR_LOGPROBS, call.drawn) in call.arguments


def summed(tensor: Tensor, *, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over a group, in place; the tensor itself on one rank."""
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor
