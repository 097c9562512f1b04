"""CUDA graphs of the decode step: one launch instead of a thousand.

A decode step of a large model launches about ten kernels per layer, each for a few microseconds of work; launching them
one by one takes longer than running them. A graph replays all of them for a fixed number of rows from fixed memory:
inputs are copied there, and -1 marks missing rows.

A capture takes as long as several eager steps, so a size must occur several times before; until then a larger graph
runs its rows. Graphs live as long as their model, and serve its next engine if the cache lies where it lay.

A graph reads the addresses that it was captured with, so what lies there must be the same. *The KV cache*: the graph
must not keep it alive. The step is therefore passed with each call and never stored, so the cache is freed with its
engine, without Python's cyclic collector. *The weights*: ZeRO 3 gathers those of a frozen model anew for each Run, so
`keep_for` drops graphs of weights that have moved. All else is the graph's own, or lives as long as the model.
"""

# B rows (of a graph: its size), M blocks of a row's table, D hidden

import functools
import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.model.linear import Copies
from rlhf_spmd.model.parallel import smallest
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.generation.kv_cache import KVCache

FEWEST_ROWS = 8  # with fewer rows a step takes no less time
APART = 32  # rows between the larger sizes
OCCURRENCES = 8  # of a size before it is captured
KEPT = 2  # caches of a model, the last ones, whose graphs live on

PaddedStep = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens_B, cached_B, tables_BM) -> hidden_BD. cached_B: number of tokens before the current one; -1: no row."""


def graph_size(num_rows: int) -> int:
    """Returns rows of the graph that runs a batch of `num_rows`: 8, 16, or a multiple of 32."""
    return max(1 << (num_rows - 1).bit_length(), FEWEST_ROWS) if num_rows <= APART else -(-num_rows // APART) * APART


class Graphs:
    """The graphs of one model over one cache.

    tables_BM: the rows' blocks, int32, written by the owner and read in place by all graphs.
    """

    def __init__(self, max_rows: int, blocks_per_row: int, device: torch.device):
        size = graph_size(max_rows)
        self.tables_BM = torch.zeros(size, blocks_per_row, dtype=torch.int32, device=device)
        self._tokens_B = torch.zeros(size, dtype=torch.int64, device=device)
        self._cached_B = torch.full((size,), -1, dtype=torch.int64, device=device)
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._read: Hashable = ()  # where the weights are that the graphs read
        self._seen: Counter[int] = Counter()  # how often each size has occurred
        self._pool = None  # memory that the graphs share: they never run at the same time
        self._number = -1  # of the last time when there were none; equal on the ranks of one copy

    def keep_for(self, model: Transformer, copies: Copies) -> None:
        """Drops the graphs unless the model's weights are where they were. Call it before the first step of a pass
        during which they stay there. Collective over the ranks of one copy, which must capture together."""
        addresses = tuple(p.data_ptr() for p in model.parameters())  # also of weights that are joined where they lie
        read: Hashable = weakref.ref(copies) if copies.forwards else addresses  # copies are made for one engine
        number, device = self._number if read == self._read else -1, self.tables_BM.device
        least, most = smallest(number, model.parallel, device), -smallest(-number, model.parallel, device)
        if least < 0 or least != most:  # elsewhere on some rank, or a rank has those of another cache
            self._captured.clear()
            self._seen.clear()
            self._read, self._pool = read, None  # a pool ends with its last graph
            self._number = next(_NUMBERS.setdefault(model, itertools.count()))

    def __call__(self, step: PaddedStep, tokens_B: Tensor, cached_B: Tensor) -> Tensor:
        """Runs the step for these rows -> hidden_BD, overwritten by the next call."""
        num_rows = len(tokens_B)
        size = graph_size(num_rows)
        self._seen[size] += 1
        if self._seen[size] <= OCCURRENCES:
            size = min((larger for larger in self._captured if larger >= size), default=0)
        if not size:
            return step(tokens_B, cached_B, self.tables_BM[:num_rows])
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
        with torch.cuda.stream(stream):  # warm-up: compiling kernels and filling caches is illegal in a capture
            step(*inputs)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # not `with torch.cuda.graph(...)`, which first synchronises the device: a message posted early may not arrive
        # before this rank continues
        with torch.cuda.stream(stream), _without_collector():
            graph.capture_begin(*(() if self._pool is None else (self._pool,)), capture_error_mode="thread_local")
            try:
                hidden_BD = step(*inputs)
            except BaseException:
                with suppress(RuntimeError):  # it says that the capture is invalid, but not why
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        self._pool = self._pool or graph.pool()
        return graph, hidden_BD


@contextmanager
def _without_collector() -> Iterator[None]:
    """Keeps Python's cyclic collector from running: what it destroys, e.g. another graph or a kernel of Triton's, may
    call CUDA in a way that ends a capture (pytorch/pytorch pull request 161037)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns one stream for all captures: cuBLAS keeps a workspace of up to 32 MiB for every stream."""
    return torch.cuda.Stream(device)


_NUMBERS: weakref.WeakKeyDictionary[Transformer, Iterator[int]] = weakref.WeakKeyDictionary()
_KEPT: weakref.WeakKeyDictionary[Transformer, dict[Hashable, Graphs]] = weakref.WeakKeyDictionary()


def graphs_of(model: Transformer, cache: KVCache, tables_shape: tuple[int, int]) -> Graphs:
    """Returns the graphs of a model over a cache: those of an engine that has ended, if its cache lay there."""
    kept = _KEPT.setdefault(model, {})
    key = tables_shape, *((x.data_ptr(), x.shape) for x in (cache.keys_LnKsd, cache.values_LnKsd))
    kept[key] = kept.pop(key) if key in kept else Graphs(*tables_shape, cache.keys_LnKsd.device)
    for old in [*kept][:-KEPT]:
        del kept[old]
    return kept[key]


def can_capture(model: Transformer, device: torch.device) -> bool:
    """Returns whether a step can be captured: on a GPU, without pipeline stages, tp only over NCCL, and without reading
    data back to the host."""
    parallel = model.parallel
    if device.type != "cuda" or parallel.shard.pp > 1:
        return False
    if parallel.group is not None and dist.get_backend(parallel.group) != "nccl":
        return False
    return model.config.rope_type != "dynamic"
