"""ZeRO 0 and 1 over any layout: gradients in one flat buffer, own all-reduce and clipping, torch's fused AdamW.

DeepSpeed is not used here: its stage 0 is silently wrong with two engines on the same ranks and rejects float64, and
its stage 1 reduces gradients inside the backward pass, where pipeline stages that share embeddings cannot meet. With
one flat buffer, the sum over the ranks is a few large all-reduces and clipping is one multiplication.

ZeRO 1 (arXiv 1910.02054, section 5.1) shards the optimizer's state and float32 masters: each data-parallel rank updates
its part of the flat weights, then the parts are all-gathered. Gradients are all-reduced, not reduce-scattered: that
sends half as much again, but every replica of a weight gets the same bits.
"""

import math
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_spmd.kernels.collectives import all_gather
from rlhf_spmd.model.parallel import is_split
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.engines.adamw import AdamW, EngineOptions, Interval, ReadState, Share, read_into, state_of

Through = Callable[[Transformer], Tensor]  # a pass of the model, whose methods it calls

BUCKET_NUMEL = 1 << 25  # numbers per all-reduce: large enough for bandwidth, small enough for pipelining in the backend
NORM_ROW = 1 << 12  # numbers whose squares are summed in their own precision
TIED = "embed_tokens.weight"  # on the first and the last stage if embeddings are tied


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of a rank in a train call's layout; None for a group of one rank."""

    data: dist.ProcessGroup | None = None  # ranks with the same shard of the weights: sum gradients
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
        whole = [(name, p) for name, p in model.named_parameters() if p.requires_grad]  # a tied weight occurs once
        if groups.tensor is not None:  # split weights first, so that the others are contiguous in the buffer
            whole.sort(key=lambda item: not is_split(item[0]))
        self._names, self._weights = [name for name, _ in whole], [p for _, p in whole]
        # Sums of bfloat16 gradients, and updates much smaller than bfloat16's resolution, need float32.
        self._wide = torch.float32 if dtype == torch.bfloat16 else dtype
        self._replicas = 1 if groups.data is None else groups.data.size()
        shards = self._replicas if options.zero == 1 else 1
        numel = sum(p.numel() for p in self._weights)
        self._gradient = torch.zeros(-(-numel // shards) * shards, dtype=self._wide, device=self._weights[0].device)
        self._gradients = self._views(self._gradient)
        if self._wide == dtype:
            for p, g in zip(self._weights, self._gradients, strict=True):
                p.grad = g  # backward adds in place
        else:
            for p, g in zip(self._weights, self._gradients, strict=True):
                p.register_post_accumulate_grad_hook(lambda p, g=g: _move_gradient(p, g))
        self._flat_weights: Tensor | None = None
        self.masters = self._make_masters(shards)
        own = slice(0, len(self._gradient)) if self._flat_weights is None else self._own_part()
        parts = [
            (place, slice(offset, offset + stop - start))
            for (name, start, stop), place, offset in self._intervals(own)
            if name in bare
        ]
        decay = options.weight_decay
        self._adamw = AdamW(self.masters, betas=options.betas, eps=options.eps, weight_decay=decay, bare=parts)

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat buffer in the shapes of the weights."""
        sizes = [p.numel() for p in self._weights]
        return [part.view_as(p) for part, p in zip(flat[: sum(sizes)].split(sizes), self._weights, strict=True)]

    def _make_masters(self, shards: int) -> list[nn.Parameter]:
        """Makes what the optimizer updates: the weights, their wide copies, or (ZeRO 1) this rank's flat part."""
        if shards == 1:
            if self._wide == self._weights[0].dtype:
                return self._weights
            masters = [nn.Parameter(p.detach().to(self._wide)) for p in self._weights]
            for master, g in zip(masters, self._gradients, strict=True):
                master.grad = g
            return masters
        self._flat_weights = torch.zeros_like(self._gradient, dtype=self._weights[0].dtype)
        for p, view in zip(self._weights, self._views(self._flat_weights), strict=True):
            p.data = view.copy_(p.data)
        mine = self._own_part()
        self._part = self._flat_weights[mine]
        # wide == dtype: the optimizer writes the weights themselves
        master = nn.Parameter(self._part.detach() if self._wide == self._part.dtype else self._part.to(self._wide))
        master.grad = self._gradient[mine]
        return [master]

    # ---- an optimizer step, see TrainEngine -------------------------------------------------------------------------

    def begin(self) -> None:
        """Zeroes the gradients."""
        self._gradient.zero_()

    def forward(self, through: Through) -> Tensor:
        """Implements `TrainEngine.forward`."""
        return through(self.model)

    def backward(self, output: Tensor, gradient: Tensor | None = None, *, last: bool) -> None:
        """Implements `TrainEngine.backward`."""
        if output.requires_grad:  # a rank without data may return a constant
            torch.autograd.backward(output, gradient)

    def update(self, *, lr: float) -> float:
        """Sums, clips and applies the gradients -> their norm, see `TrainEngine.update`."""
        self._sum_gradients()
        grad_norm = self._norm()
        if not math.isfinite(grad_norm):
            return grad_norm
        if self._max_grad_norm is not None and grad_norm > self._max_grad_norm:
            self._gradient.mul_(self._max_grad_norm / (grad_norm + 1e-6))
        self._adamw.step(lr=lr)
        self.publish()
        return grad_norm

    def _sum_gradients(self) -> None:
        """Sums over replicas first, then over slices and stages that share a weight, so its copies get equal bits."""
        if self._groups.data is not None:
            all_reduce_buckets(self._gradient, group=self._groups.data)
        if self._groups.tensor is not None:
            start = sum(p.numel() for name, p in zip(self._names, self._weights, strict=True) if is_split(name))
            all_reduce_buckets(self._gradient[start:], group=self._groups.tensor)
        if self._groups.tied is not None and TIED in self._names:
            all_reduce_buckets(self._gradients[self._names.index(TIED)].view(-1), group=self._groups.tied)

    def _norm(self) -> float:
        """Returns the L2 norm of the whole model's gradient, each weight counted on one rank."""
        if self._groups.model is None:
            return norm(self._gradient)
        mine = sum(norm(part) ** 2 for part in self._counted())
        squares = torch.tensor([mine], dtype=torch.float64, device=self._gradient.device)
        dist.all_reduce(squares, group=self._groups.model)
        return math.sqrt(squares.item())

    def _counted(self) -> Iterator[Tensor]:
        """Yields the gradients that this rank counts for its copy of the model, in as few pieces as possible."""
        start = end = 0
        for name, p in zip(self._names, self._weights, strict=True):
            elsewhere = not is_split(name) and self._groups.tp_index > 0
            elsewhere |= name == TIED and self._groups.tied is not None and self._groups.stage > 0
            if elsewhere:
                if end > start:
                    yield self._gradient[start:end]
                start = end + p.numel()
            end += p.numel()
        if end > start:
            yield self._gradient[start:end]

    @torch.no_grad()
    def publish(self) -> None:
        """Copies the masters to the weights, on every rank that has them. Collective at ZeRO 1."""
        if self._flat_weights is not None:
            if self._wide != self._part.dtype:
                self._part.copy_(self.masters[0])
            all_gather(self._flat_weights, self._part, group=self._groups.data)  # in place: the part is a view
            return
        for p, master in zip(self._weights, self.masters, strict=True):
            if p is not master:
                p.copy_(master)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def _intervals(self, numbers: slice) -> Iterator[tuple[Interval, int, int]]:
        """Yields the intervals of weights in a part of the flat buffer, each with the place of its master and where it
        begins in the flattened master."""
        start = 0
        for place, (name, p) in enumerate(zip(self._names, self._weights, strict=True)):
            first, last = max(start, numbers.start), min(start + p.numel(), numbers.stop)
            if first < last:
                master, begin = (place, start) if self._flat_weights is None else (0, numbers.start)
                yield (name, first - start, last - start), master, first - begin
            start += p.numel()

    def _shares(self, numbers: slice) -> Iterator[Share]:
        """Yields the intervals of weights in a part of the flat buffer, and where they are stored."""
        for interval, place, offset in self._intervals(numbers):
            yield Share(interval, {"master": self.masters[place], **self._adamw.moments[place]}, offset)

    def _own_part(self) -> slice:
        """Returns the part of the flat buffer that this rank updates (ZeRO 1), or writes for all replicas."""
        if self._groups.data is None:
            return slice(0, len(self._gradient))
        part = -(-len(self._gradient) // self._replicas)
        return slice(self._groups.data.rank() * part, (self._groups.data.rank() + 1) * part)

    def optimizer_state(self) -> tuple[int, dict[Interval, dict[str, Tensor]]]:
        """Implements `TrainEngine.optimizer_state`."""
        return self._adamw.num_steps, state_of(self._shares(self._own_part()))

    @torch.no_grad()
    def load(self, num_steps: int, read: ReadState) -> None:
        """Implements `TrainEngine.load`."""
        self._adamw.begin(num_steps)
        whole = slice(0, len(self._gradient))
        read_into(self._shares(whole if self._flat_weights is None else self._own_part()), read)

    # ---- weights ----------------------------------------------------------------------------------------------------

    shards_weights = False

    def gathered(self, modules: Sequence[nn.Module] | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def held(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in zip(self._names, self._weights, strict=True)}


def _move_gradient(weight: Tensor, into: Tensor) -> None:
    """Adds a micro-batch's gradient to the wide sum as soon as it is complete, and frees it."""
    into.add_(weight.grad)
    weight.grad = None


def all_reduce_buckets(flat: Tensor, *, group: dist.ProcessGroup) -> None:
    """Sums a flat tensor over the ranks of a group, in place, in concurrent buckets."""
    works = [dist.all_reduce(bucket, group=group, async_op=True) for bucket in flat.split(BUCKET_NUMEL)]
    for work in works:
        work.wait()


def norm(flat: Tensor) -> float:
    """Returns the L2 norm, by rows and then in float64: one float32 sum of 10^8 squares is wrong by a percent."""
    whole = flat.numel() // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1)
    return torch.cat([rows.double(), flat[whole:].double()]).norm().item()
