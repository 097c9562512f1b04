"""The forward passes of generation on one rank, through all stages: a token for each row, and prompts of newcomers."""

# A prompts, B rows, N tokens of both, M blocks of a row's table, D hidden

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.kernels.decode_attention import Decode
from rlhf_spmd.model.linear import Joined, in_mkl_order
from rlhf_spmd.model.paged import DecodeStep, Prefill, Round
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.generation.blocks import Scheduler
from rlhf_spmd.runtime.generation.cuda_graphs import Graphs
from rlhf_spmd.runtime.generation.kvcache import KVCache, slots_of


class Decoder:
    """Runs a model over a cache. scheduler: says in which blocks the rows are."""

    def __init__(self, model: Transformer, cache: KVCache, scheduler: Scheduler):
        self.model, self.cache, self.scheduler = model, cache, scheduler
        self.device = cache.keys_LnKsd.device
        self._graphs = Graphs.of(model, *scheduler.tables_BM.shape)
        # What the scheduler writes, a GPU reads while the host goes on: by the time that it is written again, the host
        # has waited for this step's tokens, and the copy is over.
        pinned = self.device.type == "cuda"
        self._written_BM = torch.zeros(scheduler.tables_BM.shape, dtype=torch.int32, pin_memory=pinned)
        scheduler.tables_BM = self._written_BM.numpy()
        self._has_copy = self._graphs is not None or self.device.type != "cpu"  # else both are the same
        self._tables_BM = self._written_BM
        if self._graphs is not None:
            self._tables_BM = self._graphs.tables_BM
        elif self._has_copy:
            self._tables_BM = self._written_BM.to(self.device)
        self._joined = Joined.of(model)
        self.forwards = in_mkl_order(model, scheduler.max_rows)  # of some layers, instead of their own

    def round(
        self, tokens_B: Tensor, cached_B: Tensor, prompts: Sequence[Sequence[int]], blocks: Sequence[Sequence[int]]
    ) -> Tensor | None:
        """One more token for each of the first B rows, and the prompts of newcomers with the blocks that they get, in
        one pass -> hidden of the rows, then of the prompts' last tokens, [B + A, D]; None on all stages but the last.

        cached_B: tokens before those at hand.
        """
        num_rows, lengths = len(tokens_B), [len(prompt) for prompt in prompts]
        tables_BM = self._tables(num_rows)
        if not prompts and self._graphs is not None:
            return self._graphs(self._padded, tokens_B, cached_B)
        step = self._step(cached_B, cached_B, tables_BM) if num_rows else None
        prefill = None
        if prompts:
            slots_N = slots_of(blocks, lengths, self.cache.block_size).to(self.device)
            prefill = Prefill(lengths, self.cache, slots_N)
            new_N = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
            tokens_B = torch.cat((tokens_B, new_N))
        hidden = self._through_stages(tokens_B, Round(step, prefill, self._joined))
        if not self.model.parallel.is_last or not prompts:
            return hidden if self.model.parallel.is_last else None
        last_A = torch.tensor(lengths, device=self.device).cumsum(0) - 1 + num_rows
        return torch.cat((hidden[:num_rows], hidden[last_A]))

    def _tables(self, num_rows: int) -> Tensor:
        """The blocks of the first rows, int32 [B, M], on the device."""
        if self._has_copy and self.scheduler.has_new_tables:
            used = len(self.scheduler.rows)  # newcomers included, which are decoded from the next round on
            self._tables_BM[:used].copy_(self._written_BM[:used], non_blocking=True)
            self.scheduler.has_new_tables = False
        return self._tables_BM[:num_rows]

    def _step(self, positions_B: Tensor, cached_B: Tensor, tables_BM: Tensor) -> DecodeStep:
        """What a pass needs to know of rows with so many tokens in the cache (-1: there is no row)."""
        size = self.cache.block_size
        if self.scheduler.one_block:
            slots_B = torch.arange(len(cached_B), device=self.device) * size + cached_B
        else:
            blocks_B1 = tables_BM.gather(1, (positions_B // size)[:, None])
            slots_B = blocks_B1[:, 0].long() * size + cached_B % size
        attended = Decode.prepare(tables_BM, cached_B + 1, size, self.model.dtype)
        return DecodeStep(self.cache, positions_B, slots_B, attended)

    def _padded(self, tokens_B: Tensor, cached_B: Tensor, tables_BM: Tensor) -> Tensor:
        """A decode step in which some rows are not there (cached -1): what a graph captures."""
        step = self._step(cached_B.clamp_min(0), cached_B, tables_BM)
        step.slots_B = torch.where(cached_B < 0, -1, step.slots_B)  # stored nowhere
        return self._through_stages(tokens_B, Round(step, None))

    def _through_stages(self, tokens_N: Tensor, context: Round) -> Tensor:
        """Runs this rank's stage between its neighbours -> its output_ND."""
        parallel, hidden_ND = self.model.parallel, None
        if parallel.previous is not None:
            shape = (len(tokens_N), self.model.config.hidden_size)
            hidden_ND = torch.empty(shape, dtype=self.model.dtype, device=self.device)
            dist.recv(hidden_ND, src=parallel.previous, group=parallel.stages)
        hidden_ND = self.model(tokens_N, context=context, hidden=hidden_ND)
        if parallel.next is not None:
            dist.send(hidden_ND.contiguous(), dst=parallel.next, group=parallel.stages)
        return hidden_ND
