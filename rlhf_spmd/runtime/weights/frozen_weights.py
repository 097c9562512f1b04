"""Frozen models whose weights are not on this rank's device between calls: sharded over ranks, or in host memory.

ZeRO 3 (arXiv 1910.02054, section 5.3): each rank of a group holds a part of the weights, which are gathered while a
call uses them. Without an optimizer, one flat part per rank and one all-gather per call suffice. DeepSpeed would gather
layer by layer in every forward, and so require the same number of forwards on every rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from rlhf_spmd.model.transformer import Transformer


class ShardedCopy:
    """A frozen model whose weights are sharded in equal parts over a group."""

    def __init__(self, model: Transformer, *, group: dist.ProcessGroup):
        """model: with all its weights, the same on every rank; from now on it is empty outside `gathered`."""
        self.model, self._group = model, group
        self._weights = list(model.parameters())  # a tied weight occurs once
        self._shapes = [p.shape for p in self._weights]
        flat = torch.cat([p.detach().reshape(-1) for p in self._weights])
        part = -(-len(flat) // group.size())
        self.shard = flat.new_zeros(part)  # the last shards may end in padding
        mine = flat[group.rank() * part : (group.rank() + 1) * part]
        self.shard[: len(mine)] = mine
        self._release()

    def _release(self) -> None:
        for p in self._weights:
            p.data = p.data.new_empty(0)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, `model` has its weights and may run any number of forwards, different on each rank. Collective."""
        flat = self.shard.new_empty(len(self.shard) * self._group.size())
        dist.all_gather_into_tensor(flat, self.shard, group=self._group)
        sizes = [shape.numel() for shape in self._shapes]
        pieces = flat[: sum(sizes)].split(sizes)
        for p, piece, shape in zip(self._weights, pieces, self._shapes, strict=True):
            p.data = piece.view(shape)
        try:
            yield
        finally:
            self._release()


class OffloadedCopy:
    """A frozen model whose weights are kept in host memory between calls (on a CPU they are also used there)."""

    def __init__(self, model: Transformer):
        """model: with all its weights; from now on it is empty except between `load` and `release`."""
        self._weights = list(model.parameters())
        self._device = self._weights[0].device
        on_cpu = self._device.type == "cpu"
        self.host = [p.detach() if on_cpu else p.detach().cpu().pin_memory() for p in self._weights]
        self._is_loaded = True
        self.release()

    def load(self) -> None:
        """Copies the weights to the device."""
        for p, weight in zip(self._weights, self.host, strict=True):
            p.data = weight.to(self._device, non_blocking=True)
        self._is_loaded = True

    def release(self) -> None:
        """Frees the weights on the device; they have not changed."""
        for p in self._weights:
            p.data = p.data.new_empty(0)
        self._is_loaded = False

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, the weights are on the device; afterwards they are where they were before."""
        was_loaded = self._is_loaded
        if not was_loaded:
            self.load()
        try:
            yield
        finally:
            if not was_loaded:
                self.release()
