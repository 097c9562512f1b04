"""ZeRO 0, 1 and 2 over any layout: flat gradients or parts of them, own sums and clipping, torch's fused AdamW.

DeepSpeed is not used here: its stage 0 is silently wrong with two engines on the same ranks and rejects float64, and
its stage 1 reduces gradients inside the backward pass, where pipeline stages that share embeddings cannot meet.

Replicas sum gradients by buckets (flat_layout.py): each rank gets its part of a bucket from all, and adds these in the
order of the ranks; between nodes, on each node first. So the sums have the same bits at any stage, on every replica and
in buckets of any size. Slices and stages that share a weight then sum these sums. For the norm, each replica adds the
squares of its parts.

ZeRO 1 (arXiv 1910.02054, section 5.1) shards the optimizer's state and float32 masters: each data-parallel rank updates
its parts of the flat weights, then the parts are all-gathered. At stage 0 the parts of the gradients are all-gathered
instead, and every rank makes the updates of all. Stage 2 sends buckets while backward runs, and keeps only parts
(part_sums.py). Gradients are there during a step only: between steps KV caches and gradients of other models have the
memory.
"""

import math
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_spmd.kernels.collectives import all_gather
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.engines.adamw import AdamW, EngineOptions, Interval, ReadState, Share, read_into, state_of
from rlhf_spmd.runtime.engines.flat_layout import lay_out
from rlhf_spmd.runtime.engines.host_memory import host_zeros
from rlhf_spmd.runtime.engines.part_sums import PartSums, Sender, move_gradient
from rlhf_spmd.runtime.world.scratch import scratch

Through = Callable[[Transformer], Tensor]  # a pass of the model, whose methods it calls

NORM_ROW = 1 << 12  # numbers whose squares are summed in their own precision


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of a rank in a train call's layout; None for a group of one rank."""

    data: dist.ProcessGroup | None = None  # ranks with the same shard of the weights: sum gradients
    sums: tuple[dist.ProcessGroup, ...] = ()  # row and column of these in which they do so (Layout.sum_grid)
    tensor: dist.ProcessGroup | None = None  # slices of one stage: sum the gradients of weights that are not split
    model: dist.ProcessGroup | None = None  # all shards of one copy: sum the squares of the norm
    tied: dist.ProcessGroup | None = None  # first and last stage, if they share embeddings
    tp_index: int = 0
    stage: int = 0


class FlatEngine:
    """Trains a model, or a shard of one, with a replica on every data-parallel rank; see `make_engine`."""

    def __init__(
        self,
        model: Transformer,
        *,
        groups: Groups,
        options: EngineOptions,
        bare: Set[str],
    ):
        """Makes the flat buffers.

        model: in options.dtype, alike on all ranks of groups.data.
        bare: names of weights without weight decay.
        """
        self.model, self._groups = model, groups
        self._max_grad_norm, dtype = options.max_grad_norm, options.dtype
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]  # a tied weight occurs once
        replicas, rank = (1, 0) if groups.data is None else (groups.data.size(), groups.data.rank())
        self._layout = layout = lay_out(
            named, replicas=replicas, in_slices=groups.tensor is not None, is_tied=groups.tied is not None
        )
        # Sums of bfloat16 gradients, and updates much smaller than bfloat16's resolution, need float32.
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        self._wide, device = wide, named[0][1].device
        self._flat_weights = torch.zeros(layout.numel, dtype=dtype, device=device)
        for p, view in zip(layout.weights, layout.views(self._flat_weights), strict=True):
            p.data = view.copy_(p.data)
        parts = [bucket.parts(replicas) for bucket in layout.buckets]
        self._own = [of_bucket[rank] for of_bucket in parts]  # this rank's part of each bucket
        self._shards = options.zero > 0 and replicas > 1
        self._memory: Tensor | None = None  # of a step that is under way, as the following: of the gradients
        self._gradient: Tensor | None = None  # of all weights
        self._views: list[Tensor] = []  # of each weight
        self._parts: list[Tensor] = []  # this rank's
        self._gradients: Sequence[Tensor] = ()  # of what it updates
        self._part_sums: PartSums | None = None
        if groups.data is not None and options.zero == 2:
            self._part_sums = PartSums(layout, groups.sums or [groups.data], self._parts, each=options.sums_each_pass)
        elif wide != dtype:
            for index, p in enumerate(layout.weights):
                p.register_post_accumulate_grad_hook(lambda p, index=index: move_gradient(p, self._views[index]))
        self._updated = self._own if self._shards else [part for of_bucket in parts for part in of_bucket]
        weights = [self._flat_weights[part] for part in self._updated]
        self._device = device if options.offload else None
        masters = weights
        if wide != dtype and options.offload:
            whole = host_zeros(self, sum(map(len, weights)), wide, device)
            masters = [one.copy_(part) for one, part in zip(whole.split([*map(len, weights)]), weights, strict=True)]
        elif wide != dtype:
            masters = [part.to(wide) for part in weights]
        without_decay = [
            (place, slice(offset, offset + stop - start))
            for place, part in enumerate(self._updated)
            for _, (name, start, stop), offset in layout.intervals(part)
            if name in bare
        ]
        self._adamw = AdamW(
            masters,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            bare=without_decay,
            weights=weights if wide != dtype else (),
            device=self._device,
        )

    # ---- an optimizer step, see TrainEngine -------------------------------------------------------------------------

    def begin(self) -> None:
        """Makes the gradients, which are 0."""
        self._free_gradients()  # of a step without an update
        if self._part_sums is not None:
            sizes = [part.stop - part.start for part in self._own]
            numbers = torch.zeros(sum(sizes), dtype=self._wide, device=self._flat_weights.device)
            self._parts[:] = self._gradients = numbers.split(sizes)
            return
        num_bytes = self._layout.numel * self._wide.itemsize
        self._memory = scratch(self._flat_weights.device).take(num_bytes, is_cache=False)
        self._gradient = gradient = self._memory.view(self._wide).zero_()
        self._views = self._layout.views(gradient)
        self._parts[:] = (gradient[part] for part in self._own)
        self._gradients = [gradient[part] for part in self._updated]
        if gradient.dtype == self._flat_weights.dtype:
            for p, view in zip(self._layout.weights, self._views, strict=True):
                p.grad = view  # to which backward adds in place

    def _free_gradients(self) -> None:
        """Frees what `begin` has made."""
        self._gradient = self._memory = None
        self._views.clear()
        self._parts.clear()
        self._gradients = ()
        for p in self._layout.weights:
            p.grad = None

    def forward(self, through: Through) -> Tensor:
        """Implements `TrainEngine.forward`."""
        return through(self.model)

    def backward(self, output: Tensor, gradient: Tensor | None = None, *, last: bool) -> None:
        """Implements `TrainEngine.backward`."""
        if self._part_sums is not None:
            self._part_sums.begin_pass(last=last)
        if output.requires_grad:  # a rank without data may return a constant
            torch.autograd.backward(output, gradient)
        if self._part_sums is not None:
            self._part_sums.end_pass()

    def update(self, *, lr: float) -> float:
        """Sums, clips and applies the gradients -> their norm, see `TrainEngine.update`."""
        self._sum_gradients()
        grad_norm = self._norm()
        if not math.isfinite(grad_norm):
            self._free_gradients()
            return grad_norm
        if not self._shards and self._gradient is not None:
            self._gather(self._gradient)
        if self._max_grad_norm is not None and grad_norm > self._max_grad_norm:
            torch._foreach_mul_(self._gradients, self._max_grad_norm / (grad_norm + 1e-6))
        self._adamw.step(self._gradients, lr=lr)
        self._free_gradients()
        if self._shards:
            self._gather(self._flat_weights)
        return grad_norm

    def _sum_gradients(self) -> None:
        """Sums this rank's parts over replicas first, then over slices and stages that share a weight, so its copies
        get equal bits."""
        if self._part_sums is not None:
            self._part_sums.finish()
        elif self._groups.data is not None and self._gradient is not None:
            sender = Sender(self._groups.sums or [self._groups.data], self._parts, adds=False)
            for index, bucket in enumerate(self._layout.buckets):
                sender.send(index, self._gradient[bucket.interval])
            sender.finish()
        for bucket, part in zip(self._layout.buckets, self._parts, strict=True):
            if bucket.whole:
                dist.all_reduce(part, group=self._groups.tensor)
            if bucket.tied:
                dist.all_reduce(part, group=self._groups.tied)

    def _norm(self) -> float:
        """Returns the L2 norm of the whole model's gradient, each number counted on one rank. Replicas add what they
        have of their own parts in the order of the ranks."""
        squares = torch.zeros(1, dtype=torch.float64, device=self._flat_weights.device)
        for bucket, part in zip(self._layout.buckets, self._parts, strict=True):
            if not (bucket.whole and self._groups.tp_index > 0 or bucket.tied and self._groups.stage > 0):
                squares += squared_norm(part)  # else another rank counts it for this copy of the model
        if self._groups.model is not None:
            dist.all_reduce(squares, group=self._groups.model)
        if (data := self._groups.data) is not None:
            of_all = squares.new_empty(data.size())
            all_gather(of_all, squares, group=data)
            squares = of_all
        return math.sqrt(math.fsum(squares.tolist()))

    @torch.no_grad()
    def publish(self) -> None:
        """Copies the masters to the weights, on every rank that has them. Collective at ZeRO 1."""
        for state, part in zip(self._adamw.states, self._updated, strict=True):
            self._flat_weights[part].copy_(state["master"])  # in the dtype of the masters they are the same memory
        if self._shards:
            self._gather(self._flat_weights)

    def _gather(self, flat: Tensor) -> None:
        """Gathers the parts of all replicas in place."""
        if (data := self._groups.data) is not None:
            works = [
                all_gather(flat[bucket.interval], flat[part], group=data, async_op=True)
                for bucket, part in zip(self._layout.buckets, self._own, strict=True)
            ]
            for work in works:
                work.wait()

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def _shares(self, *, only_own: bool) -> Iterator[Share]:
        """Yields the intervals of weights that this rank updates, and where they are stored."""
        starts = {part.start for part in self._own}
        for part, state in zip(self._updated, self._adamw.states, strict=True):
            if not only_own or part.start in starts:
                for _, interval, offset in self._layout.intervals(part):
                    yield Share(interval, state, offset)

    def optimizer_state(self) -> tuple[int, dict[Interval, dict[str, Tensor]]]:
        """Implements `TrainEngine.optimizer_state`."""
        if self._device is not None and self._device.type == "cuda":  # copies to host memory may be under way
            torch.cuda.current_stream(self._device).synchronize()
        return self._adamw.num_steps, state_of(self._shares(only_own=True))

    @torch.no_grad()
    def load(self, num_steps: int, read: ReadState) -> None:
        """Implements `TrainEngine.load`."""
        self._adamw.begin(num_steps)
        read_into(self._shares(only_own=False), read)

    # ---- weights ----------------------------------------------------------------------------------------------------

    shards_weights = False

    def gathered(self, modules: Sequence[nn.Module] | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def held(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in zip(self._layout.names, self._layout.weights, strict=True)}


def squared_norm(flat: Tensor) -> Tensor:
    """Returns the squared L2 norm in float64 [1], summed by rows first: one float32 sum of 10^8 squares is wrong by a
    percent."""
    whole = flat.numel() // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1)
    return torch.cat([rows.double(), flat[whole:].double()]).square().sum(0, keepdim=True)
