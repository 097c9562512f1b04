"""Train engines: one interface for an optimizer step of a model over a group of ranks, at ZeRO stage 0, 1, 2 or 3.

Stages 0, 1 and 2 are implemented here (flat_engine.py), stage 3 by DeepSpeed (deepspeed_engine.py).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.engines.adamw import EngineOptions, Interval, ReadState, decays
from rlhf_spmd.runtime.engines.deepspeed_engine import DeepSpeedEngine
from rlhf_spmd.runtime.engines.flat_engine import FlatEngine, Groups, Through


class TrainEngine(Protocol):
    """A model in training. Every rank of its group makes the same calls in the same order."""

    model: Transformer  # for forwards, also for inference (at stage 3 inside `gathered`)

    def begin(self) -> None:
        """Begins an optimizer step: there are no gradients. Then come as many forwards, each followed by its backward
        or not at once, on every rank (at least one), and the update."""

    def forward(self, through: Through) -> Tensor:
        """Runs `through(model)`, which returns what a backward begins with, e.g. this rank's share of the *global* loss
        of a micro-batch, a scalar already divided by the global count; shares are summed, not averaged. A rank without
        data must still run the model and return 0 * something. At stage 3 all ranks must use the same weights in the
        same order, and `through` runs with the engine's group as torch.distributed's default group, so it may
        communicate only with an explicit group."""

    def backward(self, output: Tensor, gradient: Tensor | None = None, *, last: bool) -> None:
        """Adds the gradients of a loss, or of a stage's output given its gradient from the next stage. last: whether it
        is the last one of the step."""

    def update(self, *, lr: float) -> float:
        """Makes one AdamW step on the sum of the gradients over all ranks of the group. Returns the global L2 norm of
        the gradient before clipping; if it is not finite, no weight changes. Collective."""

    @property
    def shards_weights(self) -> bool:
        """Whether forwards need `gathered`."""

    def gathered(self, modules: Sequence[nn.Module] | None = None) -> AbstractContextManager[None]:
        """Gives these modules (None: all of `model`) their full weights inside this context, where they may run any
        number of forwards, different on each rank.

        At stage 3 it is collective and takes the memory of these weights; else it does nothing. Not for training.
        """

    def held(self) -> dict[str, Tensor]:
        """Returns the part of each weight in training that this rank always holds, by parameter name, in the compute
        dtype; a tied weight once, under its first name. Stages 0 to 2: the live weight of this rank's shard; stage 3: a
        flat part of it."""

    def optimizer_state(self) -> tuple[int, dict[Interval, dict[str, Tensor]]]:
        """Returns the number of steps that were made, and this rank's share of "master", "exp_avg" and "exp_avg_sq" as
        flat views; the data-parallel ranks together hold each number of their shard once."""

    def load(self, num_steps: int, read: ReadState) -> None:
        """Restores such a state, however it was distributed over ranks. Call it before the first step, then `publish`.
        Local."""

    def publish(self) -> None:
        """Copies the masters to the weights in the compute dtype, on every rank that has them. Collective."""


def make_engine(model: Transformer, *, groups: Groups, options: EngineOptions) -> TrainEngine:
    """Makes an engine for a model, or this rank's shard of it, on the ranks of a layout. The engine owns the model.

    model: the same weights on every rank of groups.data; if that is None, every stage acts as stage 0, because there is
    nothing to shard. Parameters that need no gradient stay as they are. float64 is for tests.
    """
    zero, dtype = options.zero, options.dtype
    assert zero in (0, 1, 2, 3) and (dtype != torch.float64 or zero < 3), options  # DeepSpeed rejects or rounds it
    with torch.no_grad():
        for p in (p for p in model.parameters() if p.requires_grad):  # not model.to(dtype): frozen ones keep theirs
            p.data = p.data.to(dtype)
    decaying = options.weight_decay_on
    bare = {name for name, p in model.named_parameters() if options.weight_decay and not decays(name, p, decaying)}
    if groups.data is not None:
        _assert_same_weights(model, group=groups.data)
    kind = FlatEngine if zero < 3 or groups.data is None else DeepSpeedEngine
    return kind(model, groups=groups, options=options, bare=bare)


def _assert_same_weights(model: nn.Module, *, group: dist.ProcessGroup) -> None:
    """Detects different weights on the ranks, a bug that DeepSpeed would hide by broadcasting one rank's weights.

    Compares the sum of all bit patterns, which, unlike a sum of floats, does not depend on the order of summation.
    """
    patterns = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = sum(p.detach().view(patterns[p.element_size()]).sum(dtype=torch.int64) for p in model.parameters())
    extremes = torch.stack([total, -total])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    assert extremes.sum() == 0, "the ranks start from different weights"
