"""CUDA graphs of the decode step: a launch of a thousand small kernels becomes one.

A decode step of a large model launches about ten kernels per layer, each for a few microseconds of work; launching them
one by one takes longer than running them. A graph replays them all, for a fixed number of rows and from fixed memory:
inputs are copied into it, and rows that are not there are marked by -1.

A graph must not outlive the KV cache that it reads, and nothing here may keep that cache alive: the step is passed with
each call and never stored, so that the cache is freed with its engine, without waiting for Python's cyclic collector.
"""

# B rows (of a graph: a power of two), M blocks of a row's table, D hidden

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.model.transformer import Transformer

FEWEST_ROWS = 8  # below, a step takes as long as with so many

PaddedStep = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens_B, cached_B, tables_BM) -> hidden_BD. cached_B: tokens before those at hand, -1 where there is no row."""


def padded(num_rows: int) -> int:
    """Rows of the graph that such a batch runs in."""
    return max(1 << (num_rows - 1).bit_length(), FEWEST_ROWS)


class Graphs:
    """The graphs of one model over one cache, captured when a number of rows is first met.

    tables_BM: the rows' blocks, int32, which all graphs read where they lie; its owner writes them.
    """

    def __init__(self, max_rows: int, blocks_per_row: int, device: torch.device):
        size = padded(max_rows)
        self.tables_BM = torch.zeros(size, blocks_per_row, dtype=torch.int32, device=device)
        self._tokens_B = torch.zeros(size, dtype=torch.int64, device=device)
        self._cached_B = torch.full((size,), -1, dtype=torch.int64, device=device)
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = None  # memory that the graphs share: they never run at the same time

    @classmethod
    def of(cls, model: Transformer, max_rows: int, blocks_per_row: int) -> "Graphs | None":
        """Graphs for a model; None where its steps cannot be captured."""
        device = next(model.parameters()).device
        return cls(max_rows, blocks_per_row, device) if can_capture(model, device) else None

    def __call__(self, step: PaddedStep, tokens_B: Tensor, cached_B: Tensor) -> Tensor:
        """The step for these rows -> hidden_BD, overwritten by the next call."""
        num_rows = len(tokens_B)
        size = padded(num_rows)
        if size not in self._captured:
            self._captured[size] = self._capture(step, size)
        graph, hidden_BD = self._captured[size]
        self._tokens_B[:num_rows], self._cached_B[:num_rows] = tokens_B, cached_B
        self._cached_B[num_rows:size] = -1
        graph.replay()
        return hidden_BD[:num_rows]

    def _capture(self, step: PaddedStep, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        inputs = self._tokens_B[:size], self._cached_B[:size].fill_(-1), self.tables_BM[:size]
        device = self.tables_BM.device
        stream = _side_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # compiles kernels and fills caches, which a capture must not do
            step(*inputs)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # not `with torch.cuda.graph(...)`, which first waits for all that the device does: a message that has been
        # posted early may not come before this rank goes on
        with torch.cuda.stream(stream):
            graph.capture_begin(*(() if self._pool is None else (self._pool,)), capture_error_mode="thread_local")
            try:
                hidden_BD = step(*inputs)
            finally:
                graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        self._pool = self._pool or graph.pool()
        return graph, hidden_BD


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures: cuBLAS keeps a workspace of up to 32 MiB for every stream that it has met."""
    return torch.cuda.Stream(device)


def can_capture(model: Transformer, device: torch.device) -> bool:
    """Whether a step may be captured: on a GPU, whole or split by NCCL, and nothing is read back in between."""
    parallel = model.parallel
    if device.type != "cuda" or parallel.shard.pp > 1:
        return False
    if parallel.group is not None and dist.get_backend(parallel.group) != "nccl":
        return False
    return model.config.rope_type != "dynamic"
