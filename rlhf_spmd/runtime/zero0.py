"""ZeRO stage 0 without DeepSpeed: every rank holds the whole model; gradients are summed, clipped and applied by torch.

Our own, because DeepSpeed's stage 0 goes wrong silently when two engines live on the same ranks and refuses float64;
this one also needs no process group at one rank. Gradients live in one flat buffer, so that the sum over the ranks is
a few large all-reduces and clipping is one multiplication.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Loss = Callable[[nn.Module, Any], Tensor]

BUCKET_NUMEL = 1 << 25  # numbers per all-reduce: large enough for bandwidth, small enough that the backend can pipeline
NORM_ROW = 1 << 12  # numbers whose squares are added in their own precision


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one optimizer step says of itself."""

    grad_norm: float  # the true global L2 norm, before clipping; not finite: the step changed no weight


class ReplicatedEngine:
    """Train a model that every rank of a group holds in full; see `train_engine.make_engine`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float | None,
    ):
        """model: already in `dtype`, the same on every rank of the group (None: one rank)."""
        self.model = model
        self._group, self._max_grad_norm = group, max_grad_norm
        self._weights = [p for p in model.parameters() if p.requires_grad]  # a tied weight comes once
        # Sums of bfloat16 gradients, and updates far below a bfloat16's last digit, need float32.
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        numel = sum(p.numel() for p in self._weights)
        self._gradient = torch.zeros(numel, dtype=wide, device=self._weights[0].device)
        slices = self._gradient.split([p.numel() for p in self._weights])
        self._gradients = [g.view_as(p) for g, p in zip(slices, self._weights, strict=True)]
        if wide == dtype:
            self.masters = self._weights
        else:
            self.masters = [nn.Parameter(p.detach().to(wide)) for p in self._weights]
            for p, g in zip(self._weights, self._gradients, strict=True):
                p.register_post_accumulate_grad_hook(lambda p, g=g: _move_gradient(p, g))
        for master, g in zip(self.masters, self._gradients, strict=True):
            master.grad = g  # backward and the optimizer work in place
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=0.0, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
        )

    def step(self, micro_batches: Sequence[Any], loss: Loss, *, lr: float) -> StepStats:
        """One optimizer step; see `train_engine.TrainEngine.step`."""
        self._gradient.zero_()
        for micro_batch in micro_batches:
            value = loss(self.model, micro_batch)
            if value.requires_grad:  # a rank without data may return a constant
                value.backward()
        if self._group is not None:
            sum_over(self._gradient, group=self._group)
        grad_norm = norm(self._gradient)
        if not math.isfinite(grad_norm):
            return StepStats(grad_norm)
        if self._max_grad_norm is not None and grad_norm > self._max_grad_norm:
            self._gradient.mul_(self._max_grad_norm / (grad_norm + 1e-6))
        for settings in self.optimizer.param_groups:
            settings["lr"] = lr
        self.optimizer.step()
        with torch.no_grad():
            for p, master in zip(self._weights, self.masters, strict=True):
                if p is not master:
                    p.copy_(master)
        return StepStats(grad_norm)

    def gathered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def state(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}


def _move_gradient(weight: Tensor, into: Tensor) -> None:
    """Add a micro-batch's gradient to the wide sum as soon as it is complete, and free it."""
    into.add_(weight.grad)
    weight.grad = None


def sum_over(flat: Tensor, *, group: dist.ProcessGroup) -> None:
    """Sum a flat tensor over the ranks of a group, in place, in buckets that are under way together."""
    under_way = [dist.all_reduce(bucket, group=group, async_op=True) for bucket in flat.split(BUCKET_NUMEL)]
    for work in under_way:
        work.wait()


def norm(flat: Tensor) -> float:
    """L2 norm, row by row and then in float64: one float32 sum of 10^8 squares is wrong by a percent."""
    whole = flat.numel() // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1)
    return torch.cat([rows.double(), flat[whole:].double()]).norm().item()
