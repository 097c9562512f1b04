"""One optimizer step of one model on one global mini-batch, whole or pass by pass through the stages of a pipeline.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.algorithms.logprob_parity import parity
from rlhf_spmd.algorithms.masks import response_mask
from rlhf_spmd.config.options import Config
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.sequences import (
    Sequences,
    forward,
    lengths_of,
    response_logprobs,
    response_values,
    sequence_scores,
)
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.pages.algorithm import mask_words, readout_words, word_of
from rlhf_spmd.plan.layout import Layout, cut
from rlhf_spmd.plan.program.instructions import Run
from rlhf_spmd.plan.runtime_words import (
    ENTROPY,
    GENERATOR_LOGPROBS,
    LOGPROBS,
    MOST_LIKELY,
    PLACES_USED,
    SCORES,
    STEP_TOKENS,
    SUMS,
    TOKEN_SHAPES,
    VALUES,
)
from rlhf_spmd.plan.workflow import Call
from rlhf_spmd.plan.workload import Workload
from rlhf_spmd.runtime.engines.train_engine import TrainEngine
from rlhf_spmd.runtime.execute.divisors import checked_divisor, divisor_of
from rlhf_spmd.runtime.execute.page_functions import called, loss_of
from rlhf_spmd.runtime.observe.metric_sums import Meter

Rows = dict[str, Tensor]  # data key -> [B, ...]
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
    call: Call
    layout: Layout
    engine: TrainEngine
    micro_batches: list[Rows]
    prepared: list[dict[str, Tensor]]  # of each micro-batch: arguments of the loss made by its `_prepare`
    divisor: float  # of the global mini-batch's loss; 0: there is no row, and nothing is done
    numbers: Mapping[str, Any]  # options and state of the algorithm
    rate: float
    meter: Meter  # discarded if another rank reports the rows
    counted: Rows | None = None  # this rank's rows, if the step has a budget of tokens
    stats: list[Mapping[str, tuple]] = field(default_factory=list)
    inputs: dict[int, Tensor] = field(default_factory=dict)  # of a stage's micro-batches between forward and backward
    outputs: dict[int, Tensor] = field(default_factory=dict)


class Training:
    """Makes optimizer steps of rows that a handler has gathered. sampling, masks: of CallContext."""

    def __init__(self, config: Config, workload: Workload, rank: int, sampling: dict, masks: Callable):
        self.config, self.workload, self.rank, self.sampling, self.masks = config, workload, rank, sampling, masks
        tolerance = config.parity_tolerance
        self.parity_tolerance = PARITY_TOLERANCE[config.dtype] if tolerance is None else tolerance

    def begin(
        self,
        run: Run,
        call: Call,
        layout: Layout,
        engine: TrainEngine,
        rows: Rows,
        *,
        numbers: Mapping[str, Any],
        rate: float,
        micro_batch: int,
        mini_batch: int,
        meter: Meter,
        group: dist.ProcessGroup | None,
    ) -> Step:
        """rows: this rank's part of the mini-batch. numbers: options and state of the algorithm. micro_batch: rows,
        if there is no budget of tokens. mini_batch: rows of all ranks. group: of the layout; None: one rank."""
        reports, algorithm = layout.reports(self.rank), self.config.algorithm
        if call.only:
            is_used_B = rows[call.only] != 0
            rows = {key: value[is_used_B] for key, value in rows.items()}
        if self.config.mini_batch_tokens:
            is_used_B = rows[call.prompts][:, 0] >= 0
            rows = {key: value[is_used_B] for key, value in rows.items()}
        count = algorithm.companion(call.function, "_sums")
        counted_rows = rows if reports else self._no_rows(call, rows[call.prompts].device)
        counted = [divisor_of(call, counted_rows)]
        if count is not None:
            given = self._arguments(call, counted_rows) | numbers
            counted.append(called(algorithm, f"{call.function}_sums", count, given))
        of_divisor, sums = summed(torch.cat(counted), group=group).tensor_split([len(counted[0])])
        divisor, parts = checked_divisor(of_divisor.tolist(), call, algorithm.name), ([], [])
        if divisor:
            prepared: dict[str, Tensor] = {}
            prepare = algorithm.companion(call.function, "_prepare")
            if prepare is not None and all(key in rows for key in call.inputs):  # only the last stage has all of them
                given = self._arguments(call, rows) | numbers | {SUMS: sums, "divisor": of_divisor[0]}
                prepared = called(algorithm, f"{call.function}_prepare", prepare, given)
            parts = self._micro_batches(call, rows, prepared, layout, micro_batch, mini_batch, group)
        return Step(
            run,
            call,
            layout,
            engine,
            *parts,
            divisor,
            numbers,
            rate,
            meter if reports else Meter(),
            rows if self.config.mini_batch_tokens else None,
        )

    def _arguments(self, call: Call, rows: Rows) -> dict[str, Tensor]:
        """The arguments of a loss and its companions that stored rows give."""
        tokens = {key: rows[key] for key in call.responses}
        given = {name: rows[key] for name, key in call.arguments}
        return given | self.masks(mask_words(self.workload.workflow, call), tokens)

    def _no_rows(self, call: Call, device: torch.device) -> Rows:
        """Zero rows of every key that a call reads, for a rank whose rows another rank counts."""
        shapes, rows = self.workload.workflow.shapes, {}
        for key in call.inputs:
            dtype = torch.int32 if shapes[key] in TOKEN_SHAPES else torch.float32
            rows[key] = torch.empty(0, *self.workload.row_shape(key), dtype=dtype, device=device)
        return rows

    def _micro_batches(
        self,
        call: Call,
        rows: Rows,
        prepared: dict[str, Tensor],
        layout: Layout,
        micro_batch: int,
        mini_batch: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[list[Rows], list[dict[str, Tensor]]]:
        """Cuts rows and prepared arguments, into the same number of micro-batches on every rank of the layout."""
        parts = cut(row_lengths(call, rows), layout, micro_batch)
        chunks, made = (
            [{key: value[part] for key, value in all_.items()} for part in parts] for all_ in (rows, prepared)
        )
        if (
            layout.tokens is None and not call.only and not self.config.mini_batch_tokens
        ):  # every rank knows the number of the rank with most rows
            most_rows = math.ceil(mini_batch / layout.dp)
            num = math.ceil(most_rows / micro_batch)
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

    # ---- a whole step, or its passes --------------------------------------------------------------------------------

    def leave_out(self, step: Step) -> None:
        """Logs a step without a row, in place of its passes and its update."""
        self._log(step, 0.0)

    def whole(self, step: Step) -> None:
        """All micro-batches and the update, without stages."""

        def share(model: Transformer, index: int) -> Tensor:
            batch = sequences_of(step.call, step.micro_batches[index])
            return self._loss(step, model, batch, forward(model, batch), index)

        indices = range(len(step.micro_batches))
        self._log(step, step.engine.step(indices, share, lr=step.rate))

    def forward(self, step: Step, index: int, received: Tensor | None) -> Tensor | None:
        """One micro-batch through this stage -> the input of the next stage. received: from the previous stage."""
        model = step.engine.model
        if received is not None:
            step.inputs[index] = received.requires_grad_(True)
        batch = sequences_of(step.call, step.micro_batches[index])
        output = forward(model, batch, received)
        last = model.parallel.is_last
        step.outputs[index] = self._loss(step, model, batch, output, index) if last else output
        return None if last else output.detach()

    def backward(self, step: Step, index: int, received: Tensor | None) -> Tensor | None:
        """The backward pass of one micro-batch. received: the gradient of this stage's output -> that of its input."""
        step.engine.backward(step.outputs.pop(index), received)
        return step.inputs.pop(index).grad if index in step.inputs else None

    def update(self, step: Step) -> None:
        """The optimizer's part of a step with stages."""
        self._log(step, step.engine.update(lr=step.rate))

    def _log(self, step: Step, grad_norm: float) -> None:
        """Counts a step's sums. Raises UserError if the gradient was not finite."""
        if not math.isfinite(grad_norm):
            raise UserError(
                f"{step.call.name}: the gradient norm is {grad_norm} at epoch {step.run.epoch}, mini-batch "
                f"{step.run.mini_batch}; lower optimizer.{step.call.model}_lr or look at the data of this iteration"
            )
        for sums in step.stats:
            for name, (total, weight) in sums.items():
                step.meter.log(name, total, weight, self.config.algorithm.over(name))
        is_first = step.layout.dp_index(self.rank) == 0
        if step.counted is not None:
            lengths = row_lengths(step.call, step.counted)
            step.meter.add(PLACES_USED, len(lengths) / self.workload.mini_batch, is_first)
            step.meter.add(STEP_TOKENS, sum(lengths), is_first)
        if is_first:
            step.meter.add(f"{step.call.model}_grad_norm", grad_norm, 1)
            step.meter.add(f"{step.call.model}_lr", step.rate, 1)

    def should_stop(self, step: Step, *, group: dist.ProcessGroup | None, device: torch.device) -> bool:
        """Whether a mean of the step exceeds the call's limit, so that the model's other steps of the iteration are
        left out; the same on every rank of the layout. NaN exceeds any limit."""
        if step.call.stop is None:
            return False
        name, limit = step.call.stop
        own = torch.zeros(2, dtype=torch.float64, device=device)  # the sum, and over how many
        for sums in step.stats if step.layout.reports(self.rank) else ():
            if name not in sums:
                known = ", ".join(sums) or "nothing"
                raise UserError(f"{step.call.function} has stop=({name!r}, ...), but returns only these sums: {known}")
            own += torch.stack([torch.as_tensor(part, dtype=own.dtype, device=device) for part in sums[name]])
        total, weight = summed(own, group=group).tolist()
        return weight > 0 and not total / weight <= limit

    # ---- losses -----------------------------------------------------------------------------------------------------

    def _loss(self, step: Step, model: Transformer, batch: Sequences, output: Tensor, index: int) -> Tensor:
        """A micro-batch's share of the global loss, from the output of the last stage."""
        rows, call = step.micro_batches[index], step.call
        outputs, read = self._read(call, model, batch, output, rows)
        given = self._arguments(call, rows) | step.prepared[index] | read
        if call.drawn and step.run.epoch == 0 and step.run.mini_batch == 0:  # the weights are those that generated
            mask_BG = response_mask(rows[call.responses[0]])
            tokens, new_BG = rows[call.responses[0]], outputs[LOGPROBS].detach()
            self._parity_gate(rows[call.drawn], new_BG, mask_BG, tokens, step.meter, corrected=corrects(call))
        algorithm, loss = self.config.algorithm, self.config.algorithm.function(call.function)
        total, sums = loss_of(algorithm, call.function, called(algorithm, call.function, loss, step.numbers | given))
        step.stats.append(sums)
        return total / step.divisor

    def measure(
        self, call: Call, model: Transformer, batch: Sequences, output: Tensor, rows: Rows, numbers: Mapping[str, Any]
    ) -> Mapping[str, tuple]:
        """What a loss logs of some rows, without a step. numbers: options of the algorithm."""
        algorithm, loss = self.config.algorithm, self.config.algorithm.function(call.function)
        given = numbers | self._arguments(call, rows) | self._read(call, model, batch, output, rows)[1]
        return loss_of(algorithm, call.function, called(algorithm, call.function, loss, given), learns=False)[1]

    def _read(
        self, call: Call, model: Transformer, batch: Sequences, output: Tensor, rows: Rows
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What is read off the model's output: all of it, and the arguments of the loss."""
        asked = {word_of(name) for name in signature(self.config.algorithm.function(call.function)).parameters}
        words = {word: which for word, which in readout_words(self.workload.workflow, call).items() if word in asked}
        outputs = self._outputs(call, model, batch, output, rows, {what for _, what in words.values()})
        read = {
            word: outputs[what].chunk(len(call.responses))[call.responses.index(key)]
            for word, (key, what) in words.items()
        }
        return outputs, read

    def _outputs(
        self, call: Call, model: Transformer, batch: Sequences, output: Tensor, rows: Rows, asked: set[str]
    ) -> dict[str, Tensor]:
        """Logprobs (and what else is asked of an lm head), or what is asked of a scalar head, for all responses, one
        key after the other."""
        if self.workload.workflow.heads[call.model] == "lm":
            kept_BGK = rows[call.kept] if call.kept else None
            top = MOST_LIKELY in asked
            found = response_logprobs(model, batch, output, kept_BGK, entropy=call.entropy, top=top, **self.sampling)
            names = [LOGPROBS, *([ENTROPY] if call.entropy else []), *([MOST_LIKELY] if top else [])]
            return dict(zip(names, found if len(names) > 1 else [found], strict=True))
        return {what: read_output(what, model, batch, output, None, self.sampling) for what in asked}

    def _parity_gate(
        self,
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
        found = parity(old_BG, new_BG, mask_BG)
        meter.add("parity_mean_abs", found.sum_abs, found.num_tokens)
        meter.maximum("parity_max_abs", found.max_abs)
        is_free = corrected and self.config.parity_tolerance is None
        if found.max_abs > (LARGEST if is_free else self.parity_tolerance):
            token = int(responses_BG[found.row, found.position])
            fix = (
                f"the limit is parity_tolerance={self.parity_tolerance:g}: raise it if this is rounding, use float32, "
                "or let the loss correct it (importance_weights or rejection of the algorithm)"
            )
            raise UserError(
                f"generation and training disagree: token {token} at position {found.position} has logprob "
                f"{float(old_BG[found.row, found.position]):.6f} from the generator and "
                f"{float(new_BG[found.row, found.position]):.6f} in training, {found.max_abs:.2e} nats apart; "
                + (fix if math.isfinite(found.max_abs) else "lower the learning rates, or look at the model")
            )
        mean_limit = MEAN_TOLERANCE.get(self.config.dtype, math.inf) if found.num_tokens >= MEAN_TOKENS else math.inf
        if found.mean_abs > mean_limit and not is_free and self.config.parity_tolerance is None:
            raise UserError(
                f"generation and training disagree by {found.mean_abs:.2e} nats per token in the mean of "
                f"{found.num_tokens:,} tokens, more than rounding gives (the limit is {mean_limit:g} in "
                f"{self.config.dtype}): use float32 to see whether it goes away, or set parity_tolerance, "
                "which is then the only limit"
            )


def corrects(call: Call) -> bool:
    """Whether the loss of a call gets the generator's logprobs beside the old ones, to correct the difference."""
    return (GENERATOR_LOGPROBS, call.drawn) in call.arguments


def sequences_of(call: Call, rows: Rows) -> Sequences:
    """The sequences of some rows. If a call reads two responses to a prompt, all first ones come before the second."""
    prompts_BP, responses_BG = [rows[call.prompts]] * len(call.responses), [rows[key] for key in call.responses]
    if len(call.responses) == 1:
        return Sequences.join(prompts_BP[0], responses_BG[0])
    return Sequences.join(torch.cat(prompts_BP), torch.cat(responses_BG))


def row_lengths(call: Call, rows: Rows) -> list[int]:
    """Tokens of each row: of the prompt with each response that the call reads."""
    of_each = (lengths_of(rows[call.prompts], rows[key]) for key in call.responses)
    return [sum(one) for one in zip(*of_each, strict=True)]


def read_output(
    what: str, model: Transformer, batch: Sequences, output: Tensor, kept_BGK: Tensor | None, sampling: Mapping
) -> Tensor:
    """Logprobs, values or scores, from the output of the last stage."""
    if what == LOGPROBS:
        return response_logprobs(model, batch, output, kept_BGK, **sampling)
    return {VALUES: response_values, SCORES: sequence_scores}[what](model, batch, output)


def summed(tensor: Tensor, *, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over a group, in place; the tensor itself on one rank."""
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor
