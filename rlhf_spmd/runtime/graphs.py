"""CUDA graphs of the decode step: a launch of a thousand small kernels becomes one.

A decode step of a large model launches about ten kernels per layer, each for a few microseconds of work; launching them
one by one takes longer than running them. A graph replays them all, for a fixed number of rows and from fixed memory:
inputs are copied into it, and rows that are not there have length 0 and are stored nowhere.
"""

# B rows (of a graph: a power of two), M blocks of a row's table, D hidden

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.model.transformer import Transformer

FEWEST_ROWS = 8  # below, a step takes as long as with so many


class Graphs:
    """The graphs of one model over one cache, captured when a number of rows is first met."""

    def __init__(self, step: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]):
        """step(tokens_B, cached_B, lengths_B, slots_B, tables_BM) -> hidden_BD; lengths count the token at hand."""
        self._step = step
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]] = {}
        self._pool = None  # memory that the graphs share: they never run at the same time

    @staticmethod
    def can_capture(model: Transformer) -> bool:
        """Whether a step may be captured: on a GPU, whole or split by NCCL, and nothing is read back in between."""
        parallel = model.parallel
        if next(model.parameters()).device.type != "cuda" or parallel.shard.pp > 1:
            return False
        if parallel.group is not None and dist.get_backend(parallel.group) != "nccl":
            return False
        return model.config.rope_type != "dynamic"

    def __call__(self, tokens_B: Tensor, cached_B: Tensor, slots_B: Tensor, tables_BM: Tensor) -> Tensor:
        """The step for these rows -> hidden_BD, overwritten by the next call."""
        num_rows = len(tokens_B)
        size = max(1 << (num_rows - 1).bit_length(), FEWEST_ROWS)
        if size not in self._captured:
            self._captured[size] = self._capture(size, tables_BM.shape[1], tokens_B.device)
        graph, (tokens, cached, lengths, slots, tables), hidden = self._captured[size]
        tokens[:num_rows], cached[:num_rows], slots[:num_rows] = tokens_B, cached_B, slots_B
        tables[:num_rows] = tables_BM
        torch.add(cached, 1, out=lengths)
        slots[num_rows:], lengths[num_rows:] = -1, 0
        graph.replay()
        return hidden[:num_rows]

    def _capture(self, size: int, num_blocks: int, device: torch.device) -> tuple:
        zeros_B = torch.zeros(size, dtype=torch.int64, device=device)
        tables_BM = torch.zeros(size, num_blocks, dtype=torch.int32, device=device)
        inputs = (zeros_B, zeros_B.clone(), zeros_B.clone(), zeros_B - 1, tables_BM)  # rows that store nothing
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # compiles kernels and fills caches, which a capture must not do
            self._step(*inputs)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden_BD = self._step(*inputs)
        self._pool = self._pool or graph.pool()
        return graph, inputs, hidden_BD
