"""One optimizer step of one model on one global mini-batch, whole or pass by pass through the stages of a pipeline.

A step begins with one sum over all ranks of the call: counts and moments of the mini-batch, to which each row
contributes once, whatever number of ranks hold it. Where a budget of tokens cuts the rows, the ranks then agree on the
largest number of micro-batches; those that have fewer pass blank ones, whose loss is 0. (Over torch, in the call's own
group: a control message among all ranks would make the generating ones wait for those that train.)
"""

# M mini-batches, C columns, B sequences of a micro-batch, G response tokens

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.algorithms import ppo_math
from rlhf_spmd.config import Config
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.sequences import Sequences, forward, response_logprobs, response_values
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.program.instructions import Run
from rlhf_spmd.plan.workflow import Call
from rlhf_spmd.runtime.engines.engine import TrainEngine
from rlhf_spmd.runtime.execute.micro_batches import cut, lengths_of
from rlhf_spmd.runtime.observe.meter import Meter

Rows = dict[str, Tensor]  # data key -> [B, ...]
# Nats: of one token, and of the mean over some. In bfloat16 a logit between 16 and 32 has a last digit of 0.125, so one
# token in a thousand may be half a nat off by rounding (bench/LOG.md); a fault moves the mean, by nats.
PARITY_TOLERANCE = {"float32": 1e-4, "bfloat16": 2.0}
MEAN_TOLERANCE = {"bfloat16": 0.5}
MEAN_TOKENS = 256  # fewer make no mean


@dataclass(slots=True)
class Step:
    """One optimizer step under way on this rank."""

    run: Run
    call: Call
    layout: Layout
    engine: TrainEngine
    micro_batches: list[Rows]
    num_tokens: float  # response tokens of the global mini-batch
    rate: float
    meter: Meter  # a meter that nobody reads where another rank reports the rows
    stats: list[dict[str, Tensor]] = field(default_factory=list)
    inputs: dict[int, Tensor] = field(default_factory=dict)  # of a stage's forwards under way
    outputs: dict[int, Tensor] = field(default_factory=dict)

    @property
    def first(self) -> bool:
        """Whether the weights are still those that generated."""
        return self.run.epoch == 0 and self.run.mini_batch == 0


class Training:
    """Makes steps of rows that call_handlers.py has gathered. sampling: of generation, which every pass repeats."""

    def __init__(self, config: Config, rank: int, sampling: dict):
        self.config, self.rank, self.sampling = config, rank, sampling
        tolerance = config.parity_tolerance
        self.parity_tolerance = PARITY_TOLERANCE[config.dtype] if tolerance is None else tolerance
        self._losses: dict[str, Callable] = {"policy_loss": self._policy_loss, "value_loss": self._value_loss}

    def begin(
        self,
        run: Run,
        call: Call,
        layout: Layout,
        engine: TrainEngine,
        rows: Rows,
        *,
        rate: float,
        micro_batch: int,
        mini_batch: int,
        meter: Meter,
        group: dist.ProcessGroup | None,
    ) -> Step:
        """rows: this rank's part of the mini-batch, of the keys that it reads. micro_batch: sequences, if no budget of
        tokens counts. mini_batch: sequences of all ranks. group: of the layout; None for one rank."""
        reports = layout.reports(self.rank)
        mask_BG = ppo_math.response_mask(rows["responses"])
        counted = rows.get("advantages", torch.zeros_like(mask_BG, dtype=torch.float32))
        moments = ppo_math.moments(counted, mask_BG) if reports else torch.zeros(3, dtype=torch.float64)
        moments = summed(moments.to(mask_BG.device), group=group)
        if call.function == "policy_loss" and "advantages" in rows and self.config.ppo.whiten == "mini_batch":
            rows = rows | {"advantages": ppo_math.whiten(rows["advantages"], mask_BG, moments)}
        micro_batches = self._micro_batches(rows, layout, micro_batch, mini_batch, group)
        own_meter = meter if reports else Meter()
        return Step(run, call, layout, engine, micro_batches, float(moments[0]), rate, own_meter)

    def _micro_batches(
        self, rows: Rows, layout: Layout, micro_batch: int, mini_batch: int, group: dist.ProcessGroup | None
    ) -> list[Rows]:
        """Equal number on every rank of the layout."""
        lengths = lengths_of(rows["prompts"], rows["responses"])
        chunks = [{key: value[part] for key, value in rows.items()} for part in cut(lengths, layout, micro_batch)]
        if layout.tokens is None:  # every rank knows what the one with most rows has
            most_rows = math.ceil(mini_batch / layout.dp)
            num = math.ceil(most_rows / micro_batch)
        else:
            most = torch.tensor(len(chunks), device=rows["responses"].device)
            if group is not None:
                dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
            num = int(most)
        while len(chunks) < num:
            blank = {key: value.new_zeros(1, *value.shape[1:]) for key, value in rows.items()}
            blank["prompts"][:, 1:] = -1
            blank["responses"][:] = -1
            chunks.append(blank)
        return chunks

    # ---- a whole step, or its passes --------------------------------------------------------------------------------

    def whole(self, step: Step) -> float:
        """All micro-batches and the update, without stages; returns the gradient's norm."""

        def share(model: Transformer, rows: Rows) -> Tensor:
            batch = Sequences.join(rows["prompts"], rows["responses"])
            return self._loss(step, model, batch, forward(model, batch), rows)

        return self._checked(step, step.engine.step(step.micro_batches, share, lr=step.rate).grad_norm)

    def forward(self, step: Step, index: int, received: Tensor | None) -> Tensor | None:
        """One micro-batch through this stage; returns what goes to the next one. received: from the stage before."""
        rows, model = step.micro_batches[index], step.engine.model
        if received is not None:
            step.inputs[index] = received.requires_grad_(True)
        batch = Sequences.join(rows["prompts"], rows["responses"])
        output = forward(model, batch, received)
        last = model.parallel.is_last
        step.outputs[index] = self._loss(step, model, batch, output, rows) if last else output
        return None if last else output.detach()

    def backward(self, step: Step, index: int, received: Tensor | None) -> Tensor | None:
        """The way back; received: the gradient of this stage's output; returns that of its input."""
        step.engine.backward(step.outputs.pop(index), received)
        return step.inputs.pop(index).grad if index in step.inputs else None

    def update(self, step: Step) -> float:
        """The optimizer's part; returns the gradient's norm."""
        return self._checked(step, step.engine.update(lr=step.rate).grad_norm)

    def _checked(self, step: Step, grad_norm: float) -> float:
        """Raises UserError where there is no way on; else logs the step."""
        if not math.isfinite(grad_norm):
            raise UserError(
                f"{step.call.name}: the gradient norm is {grad_norm} at epoch {step.run.epoch}, mini-batch "
                f"{step.run.mini_batch}; lower optimizer.{step.call.model}_lr or look at the rewards of this iteration"
            )
        for sums in step.stats:
            weight = sums["num_tokens"]
            for name in sums.keys() - {"num_tokens"}:
                step.meter.add(name, sums[name], weight)
        if step.layout.dp_index(self.rank) == 0:
            step.meter.add(f"{step.call.model}_grad_norm", grad_norm, 1)
            step.meter.add(f"{step.call.model}_lr", step.rate, 1)
        return grad_norm

    def kl_exceeds(self, step: Step, *, group: dist.ProcessGroup | None, device: torch.device) -> bool:
        """Whether the step's approximate KL asks to stop the actor's epochs; the same on every rank of the layout."""
        limit = self.config.ppo.kl_early_stop
        if step.call.function != "policy_loss" or limit is None:
            return False
        own = sum((sums["approx_kl"] for sums in step.stats), torch.zeros((), dtype=torch.float64, device=device))
        counted = own if step.layout.reports(self.rank) else torch.zeros_like(own)
        return ppo_math.kl_exceeds(float(summed(counted, group=group)), step.num_tokens, limit)

    # ---- losses -----------------------------------------------------------------------------------------------------

    def _loss(self, step: Step, model: Transformer, batch: Sequences, output: Tensor, rows: Rows) -> Tensor:
        """A micro-batch's share of the global loss, from what the last stage puts out."""
        total, sums = self._losses[step.call.function](step, model, batch, output, rows)
        step.stats.append(sums)
        return total / max(step.num_tokens, 1.0)

    def _policy_loss(self, step: Step, model, batch: Sequences, output: Tensor, rows: Rows) -> tuple[Tensor, dict]:
        kept_BGK, options = rows.get("kept_tokens"), self.config.ppo
        with_entropy = {"entropy": options.entropy_coef > 0, **self.sampling}
        found = response_logprobs(model, batch, output, kept_BGK, **with_entropy)
        logprobs_BG, entropy_BG = found if options.entropy_coef else (found, None)
        mask_BG = ppo_math.response_mask(rows["responses"])
        old_BG = rows.get("old_logprobs", rows["logprobs"])
        if step.first:
            self._parity_gate(rows["logprobs"], logprobs_BG.detach(), mask_BG, rows, step.meter)
        loss, sums = ppo_math.policy_loss_sum(
            logprobs_BG, old_BG, rows["advantages"], mask_BG, clip_ratio=options.clip_ratio
        )
        if entropy_BG is None:
            return loss, sums
        bonus, entropy = ppo_math.entropy_bonus_sum(entropy_BG, mask_BG, coef=options.entropy_coef)
        return loss - bonus, sums | entropy

    def _value_loss(self, step: Step, model, batch: Sequences, output: Tensor, rows: Rows) -> tuple[Tensor, dict]:
        values_BG1 = response_values(model, batch, output)
        return ppo_math.value_loss_sum(
            values_BG1[:, :-1],
            rows["values"][:, :-1],
            rows["returns"],
            ppo_math.response_mask(rows["responses"]),
            clip_value=self.config.ppo.clip_value,
        )

    def _parity_gate(self, old_BG: Tensor, new_BG: Tensor, mask_BG: Tensor, rows: Rows, meter: Meter) -> None:
        """On the first mini-batch the weights are still those that generated: both passes must agree."""
        found = ppo_math.parity(old_BG, new_BG, mask_BG)
        meter.add("parity_mean_abs", found.sum_abs, found.num_tokens)
        meter.maximum("parity_max_abs", found.max_abs)
        if found.max_abs > self.parity_tolerance:
            token = int(rows["responses"][found.row, found.position])
            raise UserError(
                f"generation and training disagree: token {token} at position {found.position} has logprob "
                f"{float(old_BG[found.row, found.position]):.6f} from the generator and "
                f"{float(new_BG[found.row, found.position]):.6f} in training, {found.max_abs:.2e} nats apart; "
                f"the limit is parity_tolerance={self.parity_tolerance:g}: raise it if this is rounding, or use float32"
            )
        mean_limit = MEAN_TOLERANCE.get(self.config.dtype, math.inf) if found.num_tokens >= MEAN_TOKENS else math.inf
        if found.mean_abs > mean_limit and self.config.parity_tolerance is None:
            raise UserError(
                f"generation and training disagree by {found.mean_abs:.2e} nats per token in the mean of "
                f"{found.num_tokens:,} tokens, more than rounding gives (the limit is {mean_limit:g} in "
                f"{self.config.dtype}): use float32 to see whether it goes away, or set parity_tolerance, "
                "which is then the only limit"
            )


def summed(tensor: Tensor, *, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over a group, in place; the tensor itself on one rank."""
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor
