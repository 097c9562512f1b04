"""Frozen models whose weights are not on this rank's device between calls: sharded over ranks, or in host memory.

ZeRO 3 (arXiv 1910.02054, section 5.3): each rank of a group holds a part of the weights, which are gathered while a
call uses them: all of them for generation, one layer after another for inference (forward_by_layer). Without an
optimizer, a flat part of each layer per rank and one all-gather of each per call suffice. DeepSpeed would gather in
every forward, and so require the same number of forwards on every rank.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from rlhf_spmd.kernels.collectives import all_gather
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.engines.host_memory import copy_streams, host_zeros


class ShardedCopy:
    """A frozen model whose weights are sharded in equal parts over a group, each layer by itself, and the rest."""

    def __init__(self, model: Transformer, *, group: dist.ProcessGroup):
        """model: with all its weights, the same on every rank; from now on it is empty outside `gathered`."""
        self.model = model
        layers = [list(layer.parameters()) for layer in model.layers.values()]
        rest = [p for module in model.besides_layers() for p in module.parameters()]
        units = [_Unit(_matrices_first(weights), group) for weights in [rest, *layers]]
        self._units = {id(p): unit for unit in units for p in unit.weights}

    def shards(self) -> list[torch.Tensor]:
        """Returns what this rank holds of each unit."""
        return [unit.shard for unit in dict.fromkeys(self._units.values())]

    @contextmanager
    def gathered(self, modules: Sequence[nn.Module] | None = None) -> Iterator[None]:
        """Gives these modules (None: all of `model`) their weights inside this context, where they may run any number
        of forwards, different on each rank. Collective.

        modules: one layer, or all modules outside the layers.
        """
        weights = (p for module in modules or [self.model] for p in module.parameters())
        units = dict.fromkeys(self._units[id(p)] for p in weights)
        for unit in units:
            unit.gather()
        try:
            yield
        finally:
            for unit in units:
                unit.release()


class _Unit:
    """Some weights of a model as one flat tensor, of which each rank of a group holds a part."""

    def __init__(self, weights: list[nn.Parameter], group: dist.ProcessGroup):
        self.weights, self._group = weights, group  # a tied weight occurs once
        self._shapes = [p.shape for p in weights]
        flat = torch.cat([p.detach().reshape(-1) for p in weights])
        part = -(-len(flat) // group.size())
        self.shard = flat.new_zeros(part)  # the last shards may end in padding
        mine = flat[group.rank() * part : (group.rank() + 1) * part]
        self.shard[: len(mine)] = mine
        self.release()

    def gather(self) -> None:
        flat = self.shard.new_empty(len(self.shard) * self._group.size())
        all_gather(flat, self.shard, group=self._group)
        for p, view in zip(self.weights, _views(flat, self._shapes), strict=True):
            p.data = view

    def release(self) -> None:
        for p in self.weights:
            p.data = p.data.new_empty(0)


class OffloadedCopy:
    """A frozen model whose weights are kept in host memory between calls (on a CPU they are also used there).

    They are in one piece.
    """

    def __init__(self, model: Transformer):
        """model: with all its weights; from now on it is empty except between `load` and `release`."""
        self._weights = _matrices_first(model.parameters())
        self._shapes = [p.shape for p in self._weights]
        self._device = self._weights[0].device
        self._stream, _ = copy_streams(self._device)
        self._flat: torch.Tensor | None = None
        self.host = [p.detach() for p in self._weights]
        if self._stream is not None:
            numel = sum(p.numel() for p in self._weights)
            self._flat = host_zeros(self, numel, self._weights[0].dtype, self._device)
            self.host = _views(self._flat, self._shapes)
            for piece, weight in zip(self.host, self._weights, strict=True):
                piece.copy_(weight.detach())
        self._is_loaded = True
        self.release()

    def load(self) -> None:
        """Begins to copy the weights to the device, beside its computation."""
        weights = self.host
        if self._stream is not None and self._flat is not None:
            flat = torch.empty_like(self._flat, device=self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # which may still use the memory
            with torch.cuda.stream(self._stream):
                flat.copy_(self._flat, non_blocking=True)
            weights = _views(flat, self._shapes)
        for p, weight in zip(self._weights, weights, strict=True):
            p.data = weight
        self._is_loaded = True

    def release(self) -> None:
        """Frees the weights on the device; they have not changed."""
        self._arrive()
        for p in self._weights:
            p.data = p.data.new_empty(0)
        self._is_loaded = False

    def _arrive(self) -> None:
        """Lets the device's computation wait for what `load` copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Brings the weights to the device inside this context; afterwards they are where they were before."""
        was_loaded = self._is_loaded
        if not was_loaded:
            self.load()
        self._arrive()
        try:
            yield
        finally:
            if not was_loaded:
                self.release()


def _matrices_first(weights: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Sorts weights so that matrices that read the same input are adjacent, as in models that train: a GPU then
    computes the same bits (model/linear.py: together)."""
    return sorted(weights, key=lambda weight: weight.dim() < 2)


def _views(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Returns the tensors of these shapes in a flat one, which may end in padding."""
    sizes = [shape.numel() for shape in shapes]
    return [piece.view(shape) for piece, shape in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)]
