"""The forward passes of generation on one rank: prefill of packed prompts and the decode step, through all stages."""

# A prompts, N their tokens, B rows, M blocks of a row's table, D hidden

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.kernels.decode_attention import Decode
from rlhf_spmd.model.paged import DecodeStep, Prefill
from rlhf_spmd.model.parallel import gather_tokens
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
        self._graphs = Graphs(self._compute) if Graphs.can_capture(model) else None

    def prefill(self, tokens: Sequence[Sequence[int]], blocks: Sequence[Sequence[int]]) -> Tensor:
        """Stores the keys and values of these sequences -> hidden_AD of their last tokens (on the last stage)."""
        model, lengths = self.model, [len(sequence) for sequence in tokens]
        slots_N = slots_of(blocks, lengths, self.cache.block_size).to(self.device)
        context = Prefill(lengths, self.cache, slots_N, multiple=model.parallel.shard.tp)
        tokens_N = torch.tensor([token for sequence in tokens for token in sequence], device=self.device)
        output = self._through_stages(tokens_N, context, model.passes_on(len(tokens_N)))
        if not model.parallel.is_last:
            return output
        last_A = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        return gather_tokens(output, group=model.parallel.group)[last_A]

    def step(self, tokens_B: Tensor, cached_B: Tensor) -> Tensor:
        """One more token for every row -> hidden_BD of it. cached_B: tokens before it."""
        num_rows, size = len(tokens_B), self.cache.block_size
        tables_BM = self._tables()[:num_rows]
        if self.scheduler.one_block:
            slots_B = torch.arange(num_rows, device=self.device) * size + cached_B
        else:
            blocks_B1 = tables_BM.gather(1, (cached_B // size)[:, None])
            slots_B = blocks_B1[:, 0].long() * size + cached_B % size
        if self._graphs is not None:
            return self._graphs(tokens_B, cached_B, slots_B, tables_BM)
        return self._compute(tokens_B, cached_B, cached_B + 1, slots_B, tables_BM)

    def _compute(
        self, tokens_B: Tensor, cached_B: Tensor, lengths_B: Tensor, slots_B: Tensor, tables_BM: Tensor
    ) -> Tensor:
        """A decode step whose rows have been looked up; lengths count the token at hand."""
        attended = Decode.prepare(tables_BM, lengths_B, self.cache.block_size, self.model.dtype)
        context = DecodeStep(self.cache, cached_B, slots_B, attended)
        return self._through_stages(tokens_B, context, (len(tokens_B), self.model.config.hidden_size))

    def _tables(self) -> Tensor:
        """Every row's blocks, sent to the device when they have changed."""
        if not self.scheduler.one_block and self._version != self.scheduler.version:
            self._version = self.scheduler.version
            tables = torch.zeros(len(self.scheduler.rows), self._tables_BM.shape[1], dtype=torch.int32)
            for index, row in enumerate(self.scheduler.rows):
                tables[index, : len(row.blocks)] = torch.tensor(row.blocks, dtype=torch.int32)
            self._tables_BM[: len(tables)] = tables.to(self.device)
        return self._tables_BM

    def _through_stages(self, tokens: Tensor, context: Prefill | DecodeStep, shape: tuple[int, int]) -> Tensor:
        """Runs this rank's stage between its neighbours -> its output. shape: of what stages pass on."""
        parallel, hidden = self.model.parallel, None
        if parallel.previous is not None:
            hidden = torch.empty(shape, dtype=self.model.dtype, device=self.device)
            dist.recv(hidden, src=parallel.previous)
        hidden = self.model(tokens, context=context, hidden=hidden)
        if parallel.next is not None:
            dist.send(hidden.contiguous(), dst=parallel.next)
        return hidden
