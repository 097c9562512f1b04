"""Train engines: one optimizer step of a model over a group of ranks, at ZeRO stage 0, 1, 2 or 3, behind one interface.

Stages 0 and 1 are ours (flat_engine.py), 2 and 3 are DeepSpeed's (deepspeed_engine.py).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.engines.deepspeed_engine import DeepSpeedEngine
from rlhf_spmd.runtime.engines.flat_engine import FlatEngine, Groups, Interval, Loss, ReadState, StepStats


class TrainEngine(Protocol):
    """A model in training. Every rank of its group makes the same calls in the same order."""

    model: nn.Module  # to run forwards on, for inference too (at stage 3 inside `gathered`)

    def step(self, micro_batches: Sequence[Any], loss: Loss, *, lr: float) -> StepStats:
        """One AdamW step on the sum of the micro-batches' gradients over all ranks of the group.

        `loss(model, micro_batch)` is this rank's share of the *global* loss, a scalar that is already divided by the
        global count; shares are summed, never averaged. Every rank passes the same number of micro-batches (at least
        one). Where a rank has no data, its micro-batches still run the model forward, and their loss is 0 * something;
        at stages 2 and 3 the ranks must all reach the same weights in the same order. There, `loss` runs with the
        engine's group as torch.distributed's default group, so it may communicate only with an explicit group.
        """

    def gathered(self) -> AbstractContextManager[None]:
        """Inside, `model` holds its full weights and may run any number of forwards, different on each rank.

        Collective at stage 3, where it takes the memory of the whole model; nothing otherwise. Not for training.
        """

    def state(self) -> dict[str, Tensor]:
        """The full weights by parameter name, in the compute dtype; a tied weight once, under its first name.

        Stages 0 to 2: the live weights (valid until the next step). Stage 3: copies on the CPU; collective. Of a model
        that is split over ranks, this rank's shard.
        """

    def held(self) -> dict[str, Tensor]:
        """What of each weight this rank holds all the time: at stage 3 a flat part of it, else as `state`."""

    def optimizer_state(self) -> tuple[int, dict[Interval, dict[str, Tensor]]]:
        """The number of optimizer steps, and this rank's share of "master", "exp_avg" and "exp_avg_sq", flat views of
        what lives: the data-parallel ranks together have each number of their shard once. After the first step."""

    def load(self, num_steps: int, read: ReadState) -> None:
        """Go on from such a state, whatever ranks had which share of it; only before the first step, and `publish`
        comes next. Local."""

    def publish(self) -> None:
        """The masters into the weights of the compute dtype, on every rank that has them. Collective."""


def make_engine(
    model: nn.Module,
    *,
    groups: Groups,
    zero: int,
    dtype: torch.dtype = torch.float32,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-5,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = 1.0,
) -> TrainEngine:
    """Take over a model, or this rank's shard of it, and train it on the ranks of a layout.

    model: the same weights on every rank of groups.data; where that is None, every stage is stage 0: there is nothing
    to shard. dtype: of weights and computation; bfloat16 keeps float32 master weights and sums of gradients; float64 is
    for tests. weight_decay: AdamW's, on every weight. max_grad_norm: of the global gradient; None: no clipping.
    Raises UserError for a stage or dtype that cannot be had.
    """
    if zero not in (0, 1, 2, 3):
        raise UserError(f"ZeRO stage {zero} does not exist; choose zero=0, 1, 2 or 3")
    if dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise UserError(f"cannot train in {dtype}; choose float32 or bfloat16 (float64 with zero=0 or 1)")
    if dtype == torch.float64 and zero > 1:
        raise UserError(f"float64 is not possible with zero={zero}: DeepSpeed refuses or rounds it; choose zero=0")
    assert max_grad_norm is None or max_grad_norm > 0, max_grad_norm
    with torch.no_grad():
        for p in model.parameters():  # not model.to(dtype): buffers keep their precision
            p.data = p.data.to(dtype)
    settings = dict(betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
    if groups.data is not None:
        _assert_same_weights(model, group=groups.data)
    if zero < 2 or groups.data is None:
        return FlatEngine(model, groups=groups, zero=zero, dtype=dtype, **settings)
    return DeepSpeedEngine(model, groups=groups, zero=zero, dtype=dtype, **settings)


def _assert_same_weights(model: nn.Module, *, group: dist.ProcessGroup) -> None:
    """Weights that differ are a mistake elsewhere, which DeepSpeed would hide: it broadcasts one rank's.

    Compares the sum of all bit patterns, which (unlike a sum of floats) no order of summation changes.
    """
    patterns = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = sum(p.detach().view(patterns[p.element_size()]).sum(dtype=torch.int64) for p in model.parameters())
    extremes = torch.stack([total, -total])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    assert extremes.sum() == 0, "the ranks start from different weights"
