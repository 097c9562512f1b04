"""The generation engine: continuous batching over a paged KV cache, on one rank or on all ranks of one copy of a model.

    engine = Engine(model, eos_ids=..., longest=...)
    requests = engine.submit(prompts, bits_RG, sampling)
    engine.run(requests)                          # works ahead on later requests where places are free
    responses_RG, logprobs_RG, kept_RGK = engine.results(requests)

Each round gives free places to the next in line, and computes their prompts and a token for every row in one pass. A
token depends on its own random bits and on nothing else: not on the rows it is decoded with, nor on block sizes,
preemption or ranks.

The ranks of one copy do the same bookkeeping: those of a stage draw alike, hidden states go from stage to stage, and
the tokens from the last stage back to all.
"""

# R requests, B rows, G longest response, K largest kept set, V vocabulary, D hidden

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.kernels.sample import Sampled, sample
from rlhf_spmd.kernels.sample_shard import sample_shard
from rlhf_spmd.model.fast_attributes import bound
from rlhf_spmd.model.linear import logits_of
from rlhf_spmd.model.parallel import Parallel, vocabulary_of
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.generation.blocks import Admission, Blocks, Scheduler, Waiting
from rlhf_spmd.runtime.generation.decoder import Decoder
from rlhf_spmd.runtime.generation.kvcache import GPU_BLOCK, KVCache, blocks_that_fit
from rlhf_spmd.runtime.generation.requests import Batch, Requests, Sampling

PREFILL_TOKENS = 4096  # of one prefill, if it has more than one prompt


class Engine:
    """Generates with one copy of a model until it is dropped; weights must not change between a request's tokens."""

    def __init__(
        self,
        model: Transformer,
        *,
        longest: int,
        eos_ids: Sequence[int] = (),
        max_sequences: int = 256,
        block_size: int = 0,
        num_blocks: int = 0,
        free_bytes: float = math.inf,
        num_stored: int = 0,
        decode: Callable[[Sequence[int]], str] | None = None,
    ):
        """longest: tokens of a prompt and its response. max_sequences: decoded at the same time. block_size: tokens of
        a block; 0: on a CPU `longest`, so that a batch is a slice of the cache. num_blocks: 0: for all rows, but no
        more than free_bytes hold. num_stored: largest kept set to keep for replay. decode: token ids to text, for
        stop texts.
        """
        self.model, self.parallel, self.decode = model, model.parallel, decode
        self.device = next(model.parameters()).device
        block_size = block_size or (longest if self.device.type == "cpu" else GPU_BLOCK)
        wanted = num_blocks or max_sequences * -(-longest // block_size)
        num_blocks = _agreed(
            blocks_that_fit(model, block_size, wanted, longest, free_bytes), self.parallel, self.device
        )
        self.cache = KVCache(model, num_blocks, block_size)
        blocks_per_row, one_block = -(-longest // block_size), block_size >= longest
        blocks = Blocks(num_blocks, block_size)
        self.scheduler = Scheduler(blocks, max_sequences, PREFILL_TOKENS, blocks_per_row, one_block=one_block)
        self.decoder = Decoder(model, self.cache, self.scheduler)
        self.requests, self.longest, self.num_preempted = Requests(self.device, num_stored), longest, 0
        self._batch = Batch.none(self.device)
        self._last_hidden: dict[int, tuple[Tensor, int]] = {}  # key of a prompt -> where its last token's hidden_D is
        self._eos_E = torch.tensor(list(eos_ids), dtype=torch.int64, device=self.device)
        shard = self.parallel.shard
        self._slices = [vocabulary_of(model.config, replace(shard, tp_index=index)) for index in range(shard.tp)]
        mine = self._slices[shard.tp_index]
        self._banned = torch.tensor(
            [token - mine.start for token in eos_ids if token in mine], dtype=torch.int64, device=self.device
        )

    def submit(
        self, prompts: Sequence[Sequence[int]], bits_RG: Tensor, sampling: Sampling | Sequence[Sampling]
    ) -> range:
        """Puts requests in line -> their numbers. prompts: token ids, at least one each. bits_RG: random bits
        of each token, int64 (philox.random_bits). sampling: of all, or of each."""
        numbers = self.requests.add(prompts, bits_RG, sampling)
        keys = self.requests.keys(numbers)
        first: dict[int, int] = {}
        for index, key in enumerate(keys):
            first.setdefault(key, index)
        line = []
        for number, key, prompt in zip(numbers, keys, prompts, strict=True):
            most = self.requests.sampling[number - self.requests.first].max_new_tokens
            assert 0 < len(prompt) <= self.longest - most, (len(prompt), most, self.longest)
            line.append(Waiting(number, key, len(prompt), len(prompt)))
        self.scheduler.submit(sorted(line, key=lambda waiting: first[waiting.key]))  # equal prompts stand together
        return numbers

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way or in line."""
        return not (self.scheduler.rows or self.scheduler.waiting)

    @torch.inference_mode()
    def run(self, until: range | None = None, *, progress: Callable[[int, int], None] | None = None) -> None:
        """Advances until these requests (None: all) have ended. progress: told of each round how many requests ended
        and how many tokens were drawn."""
        missing = {number for number in until or () if not self.requests.is_ended(number)}
        with bound(self.model, self.decoder.forwards):
            while missing or (until is None and not self.is_idle):
                ended, num_tokens = self._round()
                missing.difference_update(ended)
                if progress is not None:
                    progress(len(ended), num_tokens)

    def results(self, numbers: range) -> tuple[Tensor, Tensor, Tensor | None]:
        """responses_RG (-1 after the end), logprobs_RG under the distribution sampled from (0 after the end) and, if
        sets are stored, kept_RGK int32 (-1 padding). Collective over the stages."""
        responses_RG, logprobs_RG, kept_RGK = self.requests.results(numbers)
        self._from_last_stage(logprobs_RG)
        if kept_RGK is not None:
            self._from_last_stage(kept_RGK)
        return responses_RG, logprobs_RG, kept_RGK

    def _round(self) -> tuple[list[int], int]:
        """One pass: a token for every row, the first of newcomers -> the requests that ended, and how many tokens."""
        preempted = self.scheduler.grow()
        if preempted:
            self.num_preempted += len(preempted)
            self._batch = Batch(self._batch.rows_FB[:, : len(self.scheduler.rows)])
        crowded = preempted and self.scheduler.rows  # whoever has just left would come back at once
        admitted = [] if crowded else self.scheduler.admit()
        hidden_BD = self._forward(admitted)
        self._batch.cached_B += 1
        if admitted:
            self._batch = self._batch.with_admitted(admitted, self.requests)
        num_tokens = len(self._batch)
        return self._draw(hidden_BD), num_tokens

    def _forward(self, admitted: Sequence[Admission]) -> Tensor | None:
        """Fills the blocks of newcomers and decodes the rows before them -> hidden_BD of all, on the last stage. A
        prompt that is in the cache already is not computed again."""
        fresh = [one for one in admitted if one.donor is None]
        drawn = [one.waiting.num_tokens - one.waiting.num_prompt for one in fresh]
        prompts = [self.requests.tokens(one.row.request, num) for one, num in zip(fresh, drawn, strict=True)]
        batch = self._batch
        hidden = self.decoder.round(batch.token_B, batch.cached_B, prompts, [one.row.blocks for one in fresh])
        place = {one.row.request: (hidden, len(batch) + i) for i, one in enumerate(fresh)}
        self._last_hidden |= {one.row.key: place[one.row.request] for i, one in enumerate(fresh) if not drawn[i]}
        if len(fresh) == len(admitted):
            return hidden
        self.cache.copy([one.copy for one in admitted if one.copy is not None], self.cache.block_size)
        if hidden is None:
            return None
        found = [place.get(one.row.request) or self._last_hidden[one.row.key] for one in admitted]
        return torch.cat((hidden[: len(batch)], torch.stack([hidden_ND[i] for hidden_ND, i in found])))

    def _draw(self, hidden_BD: Tensor | None) -> list[int]:
        """Draws a token for every row -> the requests that have ended, whose places are free again."""
        batch, requests = self._batch, self.requests
        index_B = batch.request_B - requests.first
        tokens_B = torch.empty_like(batch.token_B)
        if self.parallel.is_last:
            drawn = self._sample(self.model.logits(hidden_BD, head=logits_of), batch, index_B)
            tokens_B = drawn.tokens_B
            requests.logprobs_RG[index_B, batch.drawn_B] = drawn.logprobs_B.float()
            if drawn.kept_BK is not None:
                requests.kept_RGK[index_B, batch.drawn_B, : drawn.kept_BK.shape[1]] = drawn.kept_BK
        self._from_last_stage(tokens_B)
        requests.responses_RG[index_B, batch.drawn_B] = tokens_B
        batch.token_B.copy_(tokens_B)
        batch.drawn_B += 1
        ended_B = torch.isin(tokens_B, self._eos_E) | (batch.drawn_B >= batch.most_B)
        if requests.has_stops:
            ended_B |= self._stopped(batch)
        rows = [row for row, has_ended in enumerate(ended_B.tolist()) if has_ended]  # waits for the device
        if not rows:
            return []
        ended = [self.scheduler.rows[row] for row in rows]
        for row in ended:
            requests.lengths[row.request - requests.first] = self.scheduler.num_cached(row) - row.num_prompt + 1
        longest = max(map(self.scheduler.num_cached, self.scheduler.rows))
        order, copies = self.scheduler.remove(rows)
        self.cache.copy(copies, longest)
        self._batch = batch.picked(order)
        if len(self._last_hidden) > 2 * self.scheduler.max_rows:
            under_way = {row.key for row in self.scheduler.rows}
            self._last_hidden = {key: place for key, place in self._last_hidden.items() if key in under_way}
        return [row.request for row in ended]

    def _sample(self, logits_BV: Tensor, batch: Batch, index_B: Tensor) -> Sampled:
        """Tokens of all rows, alike on all tp ranks."""
        requests = self.requests
        if requests.has_minimum and len(self._banned):
            early_B1 = (batch.drawn_B < batch.least_B)[:, None]
            logits_BV[:, self._banned] = logits_BV[:, self._banned].masked_fill(early_B1, -math.inf)
        options = requests.limits(index_B) | {"num_stored": requests.num_stored}
        bits_B = requests.bits_RG[index_B, batch.drawn_B]
        if self.parallel.group is None:
            return sample(logits_BV, bits_B, **options)
        return sample_shard(logits_BV, bits_B, slices=self._slices, group=self.parallel.group, **options)

    def _stopped(self, batch: Batch) -> Tensor:
        """Which rows have just completed one of their stop texts: bool [B]."""
        assert self.decode is not None, "stop texts need a tokenizer"
        requests = self.requests
        stops = [requests.sampling[row.request - requests.first].stop for row in self.scheduler.rows]
        reaches = [_reach(stop) for stop in stops]
        most = max(reaches, default=0)
        places_BT = batch.drawn_B[:, None] - most + torch.arange(most, device=self.device)
        drawn_BG = requests.responses_RG[batch.request_B - requests.first]
        tails = drawn_BG.gather(1, places_BT.clamp_min(0)).masked_fill(places_BT < 0, -1).tolist()  # one read for all
        found = []
        for stop, reach, tail in zip(stops, reaches, tails, strict=True):
            text = self.decode([token for token in tail[-reach:] if token >= 0]) if stop else ""
            found.append(any(one in text for one in stop))
        return torch.tensor(found, device=self.device)

    def _from_last_stage(self, x: Tensor) -> None:
        """Puts into x, on every stage, what it holds on the last."""
        if self.parallel.stages is not None:
            dist.broadcast(x, group_src=self.parallel.shard.pp - 1, group=self.parallel.stages)


def _reach(stop: Sequence[str]) -> int:
    """Tokens at the end of a response in which a stop text would be found: a character takes at most 4 (a byte each),
    and some decoders change the first ones of a text."""
    return 4 * max(map(len, stop)) + 8 if stop else 0


def _agreed(number: int, parallel: Parallel, device: torch.device) -> int:
    """The smallest number of all ranks of one copy."""
    agreed = torch.tensor(number, device=device)
    for group in (parallel.group, parallel.stages):
        if group is not None:
            dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    return int(agreed)
