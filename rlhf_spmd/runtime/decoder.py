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
from rlhf_spmd.runtime.blocks import Scheduler
from rlhf_spmd.runtime.graphs import Graphs
from rlhf_spmd.runtime.kvcache import KVCache, slots_of


class Decoder:
    """Runs a model over a cache. scheduler: says in which blocks the rows are."""

    def __init__(self, model: Transformer, cache: KVCache, scheduler: Scheduler, longest: int):
        self.model, self.cache, self.scheduler = model, cache, scheduler
        self.device = cache.keys_LnKsd.device
        num_rows = scheduler.max_rows
        blocks_per_row = scheduler.blocks.needed(longest)
        self._tables_BM = torch.zeros(num_rows, blocks_per_row, dtype=torch.int32, device=self.device)
        if scheduler.one_block:
            self._tables_BM[:, 0] = torch.arange(num_rows)
        self._version = -1
        self._joined = Joined.of(model)
        self.forwards = in_mkl_order(model, num_rows)  # of some layers, instead of their own
        self._graphs = Graphs(self._compute) if Graphs.can_capture(model) else None

    def round(
        self, tokens_B: Tensor, cached_B: Tensor, prompts: Sequence[Sequence[int]], blocks: Sequence[Sequence[int]]
    ) -> Tensor | None:
        """One more token for each of the first B rows, and the prompts of newcomers with the blocks that they get, in
        one pass -> hidden of the rows, then of the prompts' last tokens, [B + A, D]; None on all stages but the last.

        cached_B: tokens before those at hand.
        """
        num_rows, lengths = len(tokens_B), [len(prompt) for prompt in prompts]
        rows = self._looked_up(cached_B) if num_rows else None
        if not prompts and self._graphs is not None:
            return self._graphs(tokens_B, cached_B, *rows)
        step = self._step(cached_B, cached_B + 1, *rows) if num_rows else None
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

    def _looked_up(self, cached_B: Tensor) -> tuple[Tensor, Tensor]:
        """slots_B of the tokens at hand, and tables_BM."""
        num_rows, size = len(cached_B), self.cache.block_size
        tables_BM = self._tables()[:num_rows]
        if self.scheduler.one_block:
            return torch.arange(num_rows, device=self.device) * size + cached_B, tables_BM
        blocks_B1 = tables_BM.gather(1, (cached_B // size)[:, None])
        return blocks_B1[:, 0].long() * size + cached_B % size, tables_BM

    def _step(self, cached_B: Tensor, lengths_B: Tensor, slots_B: Tensor, tables_BM: Tensor) -> DecodeStep:
        attended = Decode.prepare(tables_BM, lengths_B, self.cache.block_size, self.model.dtype)
        return DecodeStep(self.cache, cached_B, slots_B, attended)

    def _compute(
        self, tokens_B: Tensor, cached_B: Tensor, lengths_B: Tensor, slots_B: Tensor, tables_BM: Tensor
    ) -> Tensor:
        """A decode step whose rows have been looked up; lengths count the token at hand."""
        return self._through_stages(tokens_B, Round(self._step(cached_B, lengths_B, slots_B, tables_BM), None))

    def _tables(self) -> Tensor:
        """Every row's blocks, sent to the device when they have changed."""
        if not self.scheduler.one_block and self._version != self.scheduler.version:
            self._version = self.scheduler.version
            tables = torch.zeros(len(self.scheduler.rows), self._tables_BM.shape[1], dtype=torch.int32)
            for index, row in enumerate(self.scheduler.rows):
                tables[index, : len(row.blocks)] = torch.tensor(row.blocks, dtype=torch.int32)
            self._tables_BM[: len(tables)] = tables.to(self.device)
        return self._tables_BM

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
