"""The forward passes of generation on one rank, through all stages: new tokens of running rows, prompts of new rows."""

# A prompts, B rows, N tokens of both, M blocks of a row's table, D hidden

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_spmd.kernels import one_shot
from rlhf_spmd.kernels.decode_attention import Decode
from rlhf_spmd.model.kv_attention import Continued, DecodeStep, Prefill, Round
from rlhf_spmd.model.linear import Copies
from rlhf_spmd.model.routes import Routes
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.generation import cuda_graphs
from rlhf_spmd.runtime.generation.kv_cache import KVCache, slots_of
from rlhf_spmd.runtime.generation.scheduler import Scheduler


class Decoder:
    """Runs a model over a cache. scheduler: assigns blocks to rows. copies: of the model's weights."""

    def __init__(self, model: Transformer, cache: KVCache, scheduler: Scheduler, copies: Copies):
        self.model, self.cache, self.scheduler = model, cache, scheduler
        self.device = cache.keys_LnKsd.device
        one_shot.connect(model.parallel.group)
        captures = cuda_graphs.can_capture(model, self.device)
        self._graphs = cuda_graphs.graphs_of(model, cache, scheduler.tables_BM.shape) if captures else None
        # The GPU copies the scheduler's tables while the host continues, which calls `wait` before the scheduler writes
        # them again.
        pinned = self.device.type == "cuda"
        self._begun = torch.cuda.Event(blocking=True) if pinned else None  # the device has begun with the last round
        self._written_BM = torch.zeros(scheduler.tables_BM.shape, dtype=torch.int32, pin_memory=pinned)
        scheduler.tables_BM, scheduler.batches_admissions = self._written_BM.numpy(), captures
        self._has_copy = self._graphs is not None or self.device.type != "cpu"  # else both are the same tensor
        self._tables_BM = self._written_BM
        if self._graphs is not None:
            self._tables_BM = self._graphs.tables_BM
        elif self._has_copy:
            self._tables_BM = self._written_BM.to(self.device)
        self.copies = copies
        self.routes: Routes | None = None  # of the tokens of the next round, in their order, on a CPU

    def begin(self) -> None:
        """Begins rounds between which the weights stay where they are."""
        if self._graphs is not None:
            self._graphs.keep_for(self.model, self.copies)

    def wait(self, *, ahead: bool) -> None:
        """Waits for the device. ahead: only for what came before the last round, and for the copy of its tables."""
        if self._begun is not None:
            (self._begun if ahead else torch.cuda.current_stream(self.device)).synchronize()

    def round(
        self,
        tokens_B: Tensor,
        cached_B: Tensor,
        prompts: Sequence[Sequence[int]],
        blocks: Sequence[Sequence[int]],
        answered: Sequence[tuple[Sequence[int], int, Sequence[int]]] = (),
    ) -> Tensor | None:
        """Runs the current token of each of the B running rows and the prompts of A new rows, given with their blocks.
        Returns hidden [B + A, D] of the rows, then of the prompts' last tokens; None except on the last stage.

        That is one pass; where graphs replay the rows' part, what is new has a pass of its own, which the host launches
        while the device runs the graph.

        cached_B: number of tokens before the current one.
        answered: rows that are in the cache and get more than one token: these tokens, how many are in the cache, and
            the row's blocks; their hidden come before those of prompts.
        """
        tables_BM, new = self._tables(len(tokens_B)), (prompts, blocks, answered)
        if self._graphs is None or not len(tokens_B):
            prepared = self._prepared(tokens_B, cached_B, tables_BM, *new)
            prepared[1].routes = self.routes
            return self._run(*prepared)
        if not prompts and not answered:
            return self._graphs(self._padded, tokens_B, cached_B)
        prepared = self._prepared(tokens_B[:0], cached_B[:0], tables_BM[:0], *new)  # waits for copies to the device
        return torch.cat((self._graphs(self._padded, tokens_B, cached_B), self._run(*prepared)))

    def _prepared(
        self,
        tokens_B: Tensor,
        cached_B: Tensor,
        tables_BM: Tensor,
        prompts: Sequence[Sequence[int]],
        blocks: Sequence[Sequence[int]],
        answered: Sequence[tuple[Sequence[int], int, Sequence[int]]],
    ) -> tuple[Tensor, Round, Tensor | None]:
        """Returns the tokens of a pass, its context, and the places of the rows' and of the last new tokens."""
        num_rows, lengths = len(tokens_B), [len(prompt) for prompt in prompts]
        step = self._step(cached_B, cached_B, tables_BM) if num_rows else None
        prefill = continued = None
        if prompts:
            slots_N = slots_of(blocks, lengths, self.cache.block_size).to(self.device)
            prefill = Prefill(lengths, self.cache, slots_N)
        if answered:
            more, cached, tables = zip(*answered, strict=True)
            totals = [before + len(tokens) for before, tokens in zip(cached, more, strict=True)]
            slots = slots_of(tables, totals, self.cache.block_size).to(self.device).split(totals)
            continued = Continued(list(map(len, more)), self.cache, slots)
            prompts, lengths = [*more, *prompts], [*map(len, more), *lengths]
        context, places_A = Round(step, prefill, self.copies.joined, continued), None
        if prompts:
            new_N = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
            tokens_B = torch.cat((tokens_B, new_N))
            places_A = torch.tensor([1] * num_rows + lengths, device=self.device).cumsum(0) - 1
        return tokens_B, context, places_A

    def _run(self, tokens_N: Tensor, context: Round, places_A: Tensor | None) -> Tensor | None:
        """Runs a pass, whose kernels are launched one by one."""
        hidden_ND = self.model.through_stages(tokens_N, context)
        return (hidden_ND if places_A is None else hidden_ND[places_A]) if self.model.parallel.is_last else None

    def _tables(self, num_rows: int) -> Tensor:
        """Returns the blocks of the first rows, int32 [B, M], on the device."""
        if self._has_copy and self.scheduler.has_new_tables:
            used = len(self.scheduler.rows)  # includes new rows, which are decoded from the next round on
            self._tables_BM[:used].copy_(self._written_BM[:used], non_blocking=True)
            self.scheduler.has_new_tables = False
        if self._begun is not None:
            self._begun.record()
        return self._tables_BM[:num_rows]

    def _step(self, positions_B: Tensor, cached_B: Tensor, tables_BM: Tensor) -> DecodeStep:
        """Returns the attention context of rows with `cached_B` tokens in the cache (-1: no row)."""
        size = self.cache.block_size
        if self.scheduler.one_block:
            slots_B = torch.arange(len(cached_B), device=self.device) * size + cached_B
        else:
            blocks_B1 = tables_BM.gather(1, (positions_B // size)[:, None])
            slots_B = blocks_B1[:, 0].long() * size + cached_B % size
        attended = Decode.prepare(tables_BM, cached_B + 1, size, self.model.dtype)
        return DecodeStep(self.cache, positions_B, slots_B, attended)

    def _padded(self, tokens_B: Tensor, cached_B: Tensor, tables_BM: Tensor) -> Tensor:
        """Returns the decode step that a graph captures; missing rows have cached_B = -1."""
        step = self._step(cached_B.clamp_min(0), cached_B, tables_BM)
        step.slots_B = torch.where(cached_B < 0, -1, step.slots_B)  # missing rows are not stored
        return self.model.through_stages(tokens_B, Round(step, None, self.copies.joined))
