"""One optimizer step of one model on one global mini-batch, pass by pass; a layout without stages is a pipeline of one.

A step begins with one sum over all ranks of the call: counts and moments of the mini-batch, to which each row
contributes once, however many ranks hold it. If a budget of tokens cuts the rows, or if only some are trained on, the
ranks then agree on the largest number of micro-batches; ranks with fewer add blank ones, whose loss is 0. They agree
over torch, in the call's own group: a control message among all ranks would make the ranks that generate wait for those
that train.

If the divisor is 0, no row is left to learn. All ranks know it before the first forward, and skip the step: neither
weights nor the optimizer's state move. Only the schedule of the learning rate counts it.
"""

# M mini-batches, C columns, B sequences of a micro-batch, G response tokens

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.algorithms.controllers import learning_rate, warmup_steps_of
from rlhf_spmd.errors import UserError
from rlhf_spmd.model import sequences
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.calls import DIVISORS, LossCall, Train
from rlhf_spmd.plan.layout import cut
from rlhf_spmd.plan.program.instructions import Run
from rlhf_spmd.plan.runtime_words import LAG_SHARE, LOGPROBS, PLACES_USED, STEP_TOKENS, STEPS_MADE, SUMS
from rlhf_spmd.runtime.engines.train_engine import TrainEngine
from rlhf_spmd.runtime.execute import iteration, router_losses
from rlhf_spmd.runtime.execute.iteration import ALL, NUMBER, Iteration, Rows, Store, kept_of, mask_of
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.execute.page_functions import called, read_loss, stored_arguments
from rlhf_spmd.runtime.execute.parity_gate import corrects, log_lag, parity_gate, route_gate
from rlhf_spmd.runtime.execute.passes import Passes, deterministic
from rlhf_spmd.runtime.world.metric_sums import Meter

CANCELLED = 1e-6  # times the sum of their sizes: a smaller sum of numbers is what rounding leaves of them


def begin(job: Job, call: Train, run: Run, data: Iteration) -> "OptimizerStep | None":
    """Begins the optimizer step of a Run on its global mini-batch. None if the model's steps have been stopped early,
    or if there is no row to learn from. Collective over the Run's group."""
    number = job.state.steps.get(call.model, 0)
    job.state.steps[call.model] = number + 1
    meter = job.meter(call, data) if call.stop or call.loglinear else Meter()
    meter.add(call.model + STEPS_MADE, 0.0, 1)
    if call.model in data.stopped:
        return None
    _, columns = job.place(run)
    source_B = data.source_EMC[run.epoch, run.mini_batch, columns]
    places = (source_B, torch.arange(len(source_B), device=source_B.device))
    rows = {key: data.store.at(key, (ALL, columns))[places] for key in job.program.reads(run, job.world.rank)}
    rows[NUMBER] = source_B * job.workload.mini_batch + columns.start + places[1]
    optimizer, workload = job.config.optimizer, job.workload
    num_steps = job.config.iterations * workload.epochs * workload.num_mini_batches
    rate = learning_rate(
        number,
        peak=optimizer.lr[call.model],
        num_warmup_steps=optimizer.warmup_steps or warmup_steps_of(optimizer.warmup_ratio, num_steps),
        num_steps=num_steps,
        decay=optimizer.schedule,
        least=optimizer.min_lr_ratio,
    )
    step = OptimizerStep(job, call, run, job.models.engines[call.model], rows, rate, data, number=number)
    if not step.divisor:
        step.log(0.0)
        return None
    data.made[call.model] = step.done + 1
    meter.add(call.model + STEPS_MADE, 1.0, 0)
    step.engine.begin()
    return step


class OptimizerStep(Passes):
    """One optimizer step under way on this rank."""

    call: Train

    def __init__(
        self,
        job: Job,
        call: Train,
        run: Run,
        engine: TrainEngine,
        rows: Rows,
        rate: float,
        data: Iteration,
        *,
        number: int = 0,
    ):
        """Counts the rows of all ranks, and cuts those of this one. Collective over the Run's group.

        rows: this rank's part of the mini-batch.
        rate: the learning rate.
        data: of the iteration, in which the model's further steps may be stopped.
        number: of the step, for dropout.
        """
        super().__init__(job, call, run, engine.model, [])
        self.engine, self.rate, self.data, meter = engine, rate, data, data.meter
        self.done = data.made.get(call.model, 0)  # optimizer steps of the iteration before this one
        self.reports = job.layout(call).reports(job.world.rank)
        self.meter = meter if self.reports else Meter()  # another rank reports the rows
        self.route_meter = meter if self.model.parallel.shard.tp_index == 0 else Meter()  # a stage reports its layers
        is_used_B = rows[call.prompts][:, 0] >= 0  # a place of a step with a budget of tokens may have no row
        if call.only:
            is_used_B &= rows[call.only] != 0
        is_used_B &= kept_of(job.workload, rows, call.inputs)
        self.rows = rows = {key: value[is_used_B] for key, value in rows.items()}
        functions = job.functions[call.name]
        nothing = Store(job.workload, {}, rows[call.prompts].device)
        counted_rows = rows if self.reports else {key: nothing.make(key).flatten(0, 1) for key in call.inputs}
        counted = [divisor_of(call, counted_rows)]
        if functions.sums is not None:
            counted.append(called(job, call, stored_arguments(job, call, counted_rows), "sums"))
        shape, num_sums = job.workload.shape(call.model), sum(map(len, counted))
        counted.append(router_losses.choices(call, counted_rows, shape))
        of_divisor, sums, choices = job.reduced(torch.cat(counted), run).tensor_split([len(counted[0]), num_sums])
        self.divisor = checked_divisor(of_divisor.tolist(), call, job.config.algorithm.name)  # 0: there is no row
        self.stats: list[Mapping[str, tuple]] = []
        self.inputs: dict[int, Tensor] = {}  # of a stage's micro-batches between forward and backward
        self.outputs: dict[int, Tensor] = {}
        if not self.divisor:
            return
        made: Rows = {}
        # only the last stage has all of them
        if functions.prepare is not None and all(key in rows for key in call.inputs):
            given = stored_arguments(job, call, rows) | {SUMS: sums, "divisor": of_divisor[0]}
            made = called(job, call, given, "prepare")
        self.micro_batches, self.prepared = _micro_batches(job, call, run, rows, made)
        dropout = iteration.dropout_of(job.config.seed, shape.adapters, call.model, number)
        self.batches = [iteration.sequences_of(call, part, dropout) for part in self.micro_batches]
        if call.name in job.workload.counted:
            with self.within():
                self.batches, own = router_losses.counted(self.model, self.batches, shape)
            choices = job.reduced(own * self.reports, run)
        self.routes = [batch.routes for batch in self.batches if batch.routes is not None]  # of a mixture
        if self.routes:
            meter, is_first = self.route_meter, self.model.parallel.shard.tp_index == 0
            router_losses.begin(self.routes, choices, shape, job.config.experts, meter, counts=is_first)

    def within(self) -> AbstractContextManager[object]:
        """Implements `Passes.within`; an engine has its weights."""
        return deterministic() if self.job.config.deterministic else nullcontext()

    def forward(self, index: int, received_nD: Tensor | None = None) -> Tensor | None:
        """Implements `Passes.forward`; the last stage computes the micro-batch's share of the global loss."""
        if received_nD is not None:
            self.inputs[index] = received_nD.requires_grad_(True)
        batch, is_last = self.batches[index], self.model.parallel.is_last

        def through(model: Transformer) -> Tensor:
            """Returns the output of this stage; of the last one the loss."""
            output_nD = sequences.forward(model, batch, received_nD)
            # the weights that generated
            is_first = self.call.drawn and self.run.epoch == 0 and self.run.mini_batch == 0
            if is_first and batch.routes is not None and not self.job.program.placement.ahead:
                route_gate(self.job.config, batch.routes, self.route_meter, corrected=corrects(self.call))
            if not is_last:
                return output_nD
            rows, prepared = self.micro_batches[index], self.prepared[index]
            given = prepared | self.of_lag()
            total, sums, outputs = read_loss(self.job, self.call, model, batch, output_nD, rows, given)
            self.stats.append(sums)
            if is_first:
                old_BG, new_BG = rows[self.call.drawn], outputs[LOGPROBS].detach()
                tokens_BG, mask_BG = rows[self.call.responses[0]], mask_of(rows, self.call.responses[0])
                if self.job.program.placement.ahead:  # the gate was where they were drawn
                    log_lag(old_BG, new_BG, mask_BG, self.meter, self.data.lag)
                else:
                    corrected = corrects(self.call)
                    parity_gate(self.job.config, old_BG, new_BG, tokens_BG, mask_BG, self.meter, corrected=corrected)
            return total / self.divisor

        self.outputs[index] = output = self.engine.forward(through)
        return None if is_last else output.detach()

    def of_lag(self) -> dict[str, float]:
        """Returns the arguments of a loss that interpolates old logprobs (importance.proximal)."""
        if not self.call.loglinear:
            return {}
        workload, made = self.job.workload, self.data.before.get(self.call.model + STEPS_MADE, 1.0)
        # between sampling the rows and the beginning of training on them; steps that were left out do not count
        num_steps = self.data.lag * round(workload.epochs * workload.num_mini_batches * made)
        return {LAG_SHARE: num_steps / (num_steps + self.done) if num_steps else 0.0}

    def backward(self, index: int, received_nD: Tensor | None = None) -> Tensor | None:
        """Implements `Passes.backward`."""
        self.engine.backward(self.outputs.pop(index), received_nD, last=index == len(self.batches) - 1)
        return self.inputs.pop(index).grad if index in self.inputs else None

    def close(self) -> None:
        """Updates the weights. Raises UserError if the gradient was not finite."""
        router_losses.log(self.routes, self.route_meter)
        self.log(self.engine.update(lr=self.rate))
        if self.should_stop():
            self.data.stopped.add(self.call.model)

    def log(self, grad_norm: float) -> None:
        """Counts the step's sums."""
        job, call = self.job, self.call
        if not math.isfinite(grad_norm):
            raise UserError(
                f"{call.name}: the gradient norm is {grad_norm} at epoch {self.run.epoch}, mini-batch "
                f"{self.run.mini_batch}; lower optimizer.{call.model}_lr or look at the data of this iteration"
            )
        for sums in self.stats:
            for name, (total, weight) in sums.items():
                self.meter.log(name, total, weight, job.config.algorithm.over(name))
        is_first = job.layout(call).dp_index(job.world.rank) == 0
        if job.config.mini_batch_tokens:
            lengths = iteration.row_lengths(call, self.rows)
            self.meter.add(PLACES_USED, len(lengths) / job.workload.mini_batch, is_first)
            self.meter.add(STEP_TOKENS, sum(lengths), is_first)
        if is_first:
            self.meter.add(f"{call.model}_grad_norm", grad_norm, 1)
            self.meter.add(f"{call.model}_lr", self.rate, 1)

    def should_stop(self) -> bool:
        """Returns whether a mean of the step exceeds the call's limit, so that the model's other steps of the iteration
        are left out; the same on every rank of the layout. NaN exceeds any limit."""
        if self.call.stop is None:
            return False
        (name, limit), device = self.call.stop, self.job.world.device
        own = torch.zeros(2, dtype=torch.float64, device=device)  # the sum, and over how many
        for sums in self.stats if self.reports else ():
            if name not in sums:
                known = ", ".join(sums) or "nothing"
                raise UserError(f"{self.call.function} has stop=({name!r}, ...), but returns only these sums: {known}")
            own += torch.stack([torch.as_tensor(part, dtype=own.dtype, device=device) for part in sums[name]])
        total, weight = self.job.reduced(own, self.run).tolist()
        return weight > 0 and not total / weight <= limit


def _micro_batches(job: Job, call: Train, run: Run, rows: Rows, prepared: Rows) -> tuple[list[Rows], list[Rows]]:
    """Cuts rows and prepared arguments, into the same number of micro-batches on every rank of the layout."""
    layout = job.layout(call)
    micro_batch = job.micro_batch(layout)
    parts = cut(iteration.row_lengths(call, rows), layout, micro_batch)
    chunks, made = ([{key: value[part] for key, value in all_.items()} for part in parts] for all_ in (rows, prepared))
    if layout.tokens is None and not call.only and not job.config.mini_batch_tokens:
        # every rank knows the number of the rank with most rows
        num = math.ceil(math.ceil(job.workload.mini_batch / layout.dp) / micro_batch)
    else:
        most = torch.tensor(len(chunks), device=rows[call.prompts].device)
        num = int(job.reduced(most, run, dist.ReduceOp.MAX))
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


def divisor_of(call: LossCall, rows: Mapping[str, Tensor]) -> Tensor:
    """Returns the divisor of the loss of these rows, float64 [1]: response tokens, responses that have tokens, or rows;
    or [2]: the sum of the numbers of a key, and that of their sizes.

    rows: data key -> [B, ...].
    """
    if call.divisor not in DIVISORS:
        numbers = rows[call.divisor].double()
        return torch.stack([numbers.sum(), numbers.abs().sum()])
    masks = [mask_of(rows, key) for key in call.responses]
    if call.divisor == "rows":
        return masks[0].new_tensor([len(masks[0])], dtype=torch.float64)
    counts = [mask.any(1).sum() if call.divisor == "responses" else mask.sum() for mask in masks]
    return torch.stack(counts).sum().double()[None]


def checked_divisor(found: Sequence[float], call: LossCall, page: str) -> float:
    """Returns the divisor of a global mini-batch, positive, or 0 where there is no row. Raises UserError for a sum by
    which a loss cannot be divided, also for one of numbers that cancel each other.

    found: of divisor_of, summed over ranks.
    page: the algorithm's name.
    """
    divisor, size = found[0], found[-1]
    if (divisor == 0 == size) or CANCELLED * size < divisor < math.inf:
        return divisor
    raise UserError(
        f"algorithm {page}: {call.name} divides the loss of a mini-batch by the sum of {call.divisor}, which is "
        f"{divisor:g}, of numbers whose sizes sum to {size:g}; give rows numbers of at least 0 (the mini-batch is left "
        "out where all are 0), or the call another divisor"
    )
