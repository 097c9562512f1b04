"""ZeRO 3 for a model that does not train: each rank of a group keeps a part of its weights, and all ranks gather the
whole of them while a call uses it (ZeRO, arXiv 1910.02054, section 5.3).

Our own, because there is nothing to optimise: one flat part per rank and one all-gather per call do it, while DeepSpeed
would gather layer by layer in every forward and so ask every rank for the same number of forwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from rlhf_spmd.model.transformer import Transformer


class ShardedCopy:
    """A frozen model whose weights lie in equal parts on the ranks of a group."""

    def __init__(self, model: Transformer, *, group: dist.ProcessGroup):
        """model: with all its weights, the same on every rank; it is empty from now on, but inside `gathered`."""
        self.model, self._group = model, group
        self._weights = list(model.parameters())  # a tied weight comes once
        self._shapes = [p.shape for p in self._weights]
        flat = torch.cat([p.detach().reshape(-1) for p in self._weights])
        part = -(-len(flat) // group.size())
        self.shard = flat.new_zeros(part)  # the last ones may end in padding
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
