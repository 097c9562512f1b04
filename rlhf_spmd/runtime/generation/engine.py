"""The generation engine: continuous batching over a paged KV cache, on one rank or on all ranks of one copy of a model.

    engine = Engine(model, eos_ids=..., longest=...)
    requests = engine.submit(prompts, bits_RG, sampling)
    engine.run(requests)                          # also starts later requests if rows are free
    responses_RG, logprobs_RG, support_RGK = engine.results(requests)

Each round admits waiting requests to free rows, and computes their prompts and a token for every running row, in one
pass if no CUDA graph runs the latter. A token depends only on its context and its own random bits, not on the other
rows, block sizes, preemption or ranks. In an episode (episodes.py), a row whose turn has ended keeps its cache outside
the batch, until its answer is appended and it goes on.

Where graphs run, a round is launched before the host reads which rows ended in the one before, so the device need not
wait for the host. These rows draw a token more, which is in no result. Rounds in which a row might be preempted, and
those of requests with stop texts or several turns, wait.

All ranks of one copy of the model run the same scheduler. Hidden states go from stage to stage; the ranks of the last
stage draw the same tokens and send them to the other stages.
"""

# R requests, B rows, G longest response, K largest sampling support, V vocabulary, D hidden

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.kernels.known_tokens import KnownTokens
from rlhf_spmd.kernels.products import product
from rlhf_spmd.kernels.sample import Sampled, sample
from rlhf_spmd.kernels.sample_shard import sample_shard
from rlhf_spmd.kernels.soft_cap import cap_in_place
from rlhf_spmd.model.fast_attributes import fast_attributes
from rlhf_spmd.model.linear import Copies, sum_bytes
from rlhf_spmd.model.parallel import smallest, vocabulary_of
from rlhf_spmd.model.texts.tokenizer import has_stop
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.generation.decoder import Decoder
from rlhf_spmd.runtime.generation.episodes import Answer, Turns
from rlhf_spmd.runtime.generation.kv_cache import GPU_BLOCK, KVCache, blocks_that_fit
from rlhf_spmd.runtime.generation.requests import Batch, Begun, Requests, Sampling
from rlhf_spmd.runtime.generation.route_record import RouteRecord, Span
from rlhf_spmd.runtime.generation.scheduler import Admission, Blocks, Row, Scheduler

PREFILL_TOKENS = 4096  # limit of one prefill with more than one prompt
WAIT_S = 1.0  # for an answer, before the engine looks again


class Engine:
    """Generates with one copy of a model. Weights must not change between the tokens of a request; between two calls of
    `run` they may move to other memory."""

    def __init__(
        self,
        model: Transformer,
        *,
        longest: int,
        eos_ids: Sequence[int] = (),
        known: KnownTokens | None = None,
        max_sequences: int = 256,
        block_size: int = 0,
        num_blocks: int = 0,
        free_bytes: float = math.inf,
        num_stored: int = 0,
        num_steps: float = math.inf,
        decode: Callable[..., str] | None = None,
        turns: Turns | None = None,
        adds_adapters: bool = False,
        records_routes: bool = False,
    ):
        """Sets up an engine for a model.

        longest: limit of prompt + response, in tokens.
        known: the tokens that may be drawn; None: all.
        max_sequences: decoded at the same time.
        block_size: tokens per block; 0: `longest` on a CPU, so that a batch is a slice of the cache, else GPU_BLOCK.
        num_blocks: 0: enough for all rows, limited by free_bytes.
        num_stored: largest sampling support to store for replay; 0: none.
        num_steps: expected, which must earn the packing of weights.
        decode: of a Tokenizer, for stop texts.
        turns: of episodes; None: a response is one turn.
        adds_adapters: multiply with copies of the weights to which these are added.
        records_routes: of a mixture of experts, which experts each token takes.
        """
        self.model, self.parallel, self.decode, self.turns = model, model.parallel, decode, turns
        self.device = next(model.parameters()).device
        model.ropes.longest = max(model.ropes.longest, longest)
        block_size = block_size or (longest if self.device.type == "cpu" else GPU_BLOCK)
        shard, known = self.parallel.shard, known or KnownTokens(model.config.vocab_size)
        slices = [vocabulary_of(model.config, replace(shard, tp_index=index)) for index in range(shard.tp)]
        self._slices = [known.within(one) for one in slices]
        mine = self._slices[shard.tp_index]
        self._width = known.width(slices[shard.tp_index])
        num_logits = self._width if self.parallel.is_last else 0
        how: dict[str, Any] = {"num_rows": max_sequences, "num_steps": num_steps, "num_logits": num_logits}
        self._copies = Copies(model, **how, adds_adapters=adds_adapters)
        free_bytes -= sum_bytes(model) if adds_adapters else 0
        wanted = num_blocks or max_sequences * -(-longest // block_size)
        num_blocks = smallest(
            blocks_that_fit(model, block_size, wanted, longest, free_bytes), self.parallel, self.device
        )
        self.cache = KVCache(model, num_blocks, block_size)
        blocks_per_row, one_block = -(-longest // block_size), block_size >= longest
        blocks = Blocks(num_blocks, block_size)
        self.scheduler = Scheduler(blocks, max_sequences, PREFILL_TOKENS, blocks_per_row, one_block=one_block)
        self.scheduler.opens_rows = turns is not None and turns.bits_of is not None
        self.decoder = Decoder(model, self.cache, self.scheduler, self._copies)
        self.requests, self.longest, self.num_preempted = Requests(self.device, num_stored), longest, 0
        self.routes = RouteRecord(model, longest) if records_routes else None
        self._batch = Batch(torch.zeros(6, 0, dtype=torch.int64, device=self.device))
        self.runs_ahead = (
            self.scheduler.batches_admissions
        )  # launches a round before it reads what ended in the one before
        self._unread: list[tuple[list[Row], Tensor, Tensor]] = []  # what `_draw` told of rounds under way
        self._shares_answers = turns is not None and self.parallel.copy is not None  # in each round
        self._is_stuck = False  # until an answer comes
        self.unopened: set[int] = set()  # requests whose prompts have not come
        self._last_hidden: dict[int, tuple[Tensor, int]] = {}  # prompt key -> where the hidden_D of its last token is
        self._eos_E = torch.tensor(list(eos_ids), dtype=torch.int64, device=self.device)
        self._holes_H = known.columns_of_holes(mine, self.device)
        self._banned = torch.tensor(
            [token - mine.start for token in eos_ids if token in mine], dtype=torch.int64, device=self.device
        )

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        bits_RG: Tensor,
        sampling: Sampling | Sequence[Sampling],
        begun: Begun | None = None,
    ) -> range:
        """Queues requests and returns their numbers.

        prompts: token ids, at least one each; none if an answer opens the row.
        bits_RG: random bits of each token, int64 (philox.random_bits).
        sampling: for all requests, or one per request.
        begun: the first tokens of their responses, which are prefilled like prompts; None: there are none.
        """
        numbers = self.requests.add(prompts, bits_RG, sampling)
        if self.routes is not None:
            self.routes.add(len(numbers))
        keys = self.requests.keys(numbers)
        queued = []
        drawn = self.requests.begin(numbers, begun) if begun is not None else [0] * len(numbers)
        for number, key, prompt, num in zip(numbers, keys, prompts, drawn, strict=True):
            most = self.requests.most[number - self.requests.first]
            assert len(prompt) <= self.longest - most, (len(prompt), most, self.longest)
            if not prompt:
                assert self.turns is not None, "only answers open rows"
                self.unopened.add(number)
            elif not self.requests.is_ended(number):
                queued.append(Row(number, key, len(prompt), len(prompt) + num))
        # equal prompts are adjacent
        self.scheduler.waiting.extend(sorted(queued, key=lambda row: row.key))
        return numbers

    @property
    def is_idle(self) -> bool:
        """Whether no request is running or waiting."""
        return not (self.scheduler.rows or self.scheduler.waiting or self.scheduler.outside or self.unopened)

    @torch.inference_mode()
    def run(self, until: range | None = None, *, progress: Callable[[int, int], None] | None = None) -> None:
        """Runs until these requests (None: all) have ended. progress: called after each round with the numbers of
        requests that ended and of tokens drawn."""
        self.decoder.begin()
        missing = {number for number in until or () if not self.requests.is_ended(number)}
        with fast_attributes(self.model, self._copies.forwards):
            while missing or (until is None and not self.is_idle):
                ended, num_tokens = self._round()
                missing.difference_update(ended)
                if progress is not None:
                    progress(len(ended), num_tokens)
        self.decoder.wait(ahead=False)  # a round under way reads the weights

    def results(self, numbers: range) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns responses_RG (-1 after the end), logprobs_RG under the distribution sampled from (0 after the end)
        and, if num_stored, support_RGK int32 (padded with -1). Collective over the stages."""
        responses_RG, logprobs_RG, support_RGK = self.requests.results(numbers)
        self._from_last_stage(logprobs_RG)
        if support_RGK is not None:
            self._from_last_stage(support_RGK)
        return responses_RG, logprobs_RG, support_RGK

    def _round(self) -> tuple[list[int], int]:
        """Runs one pass: draws a token for every row, including new ones. Returns the requests that ended, and the
        number of tokens."""
        over: list[int] = []
        answers: list[Answer] = []
        if self.scheduler.outside or self.unopened or self._shares_answers:
            over, answers = self._answers()
        ahead = self.runs_ahead and self.turns is None and not self.requests.has_stops and self.scheduler.has_room
        over += self._read(0) if self._unread and not ahead else []
        preempted = self.scheduler.grow()
        if preempted:
            self.num_preempted += len(preempted)
            self._batch = Batch(self._batch.rows_FB[:, : len(self.scheduler.rows)])
        answered = [row for row in map(self._resumed, answers) if row is not None]
        is_full = preempted and self.scheduler.rows  # admitting would bring preempted requests back at once
        admitted = [] if is_full else self.scheduler.admit()
        self._is_stuck = not self.scheduler.rows
        if self._is_stuck:
            return over, 0
        hidden_BD = self._forward(admitted, answered)
        self._batch.cached_B += 1
        if answered or admitted:
            new = [row for row, _ in answered] + [one.row for one in admitted]
            self._batch = self._batch.with_rows(new, self.requests)
        self._unread.append(self._draw(hidden_BD))
        ended = self._read(1) if ahead else []
        num_tokens = len(self._batch)  # without those of rows that had ended
        if not ahead or all(
            self.scheduler.num_cached(row) - row.num_prompt + 1 >= self.requests.most[row.request - self.requests.first]
            for row in self.scheduler.rows
        ):  # nobody goes on
            ended += self._read(0)
        return over + ended, num_tokens

    def _read(self, num_left: int) -> list[int]:
        """Reads which rows ended in the rounds under way, up to the last num_left; these rows are removed -> their
        requests."""
        self.decoder.wait(ahead=num_left > 0)
        return [request for _ in self._unread[num_left:] for request in self._removed(*self._unread.pop(0))]

    def _answers(self) -> tuple[list[int], list[Answer]]:
        """Takes what has come back to rows outside: the requests that it ends, and the answers with which others go
        on."""
        assert self.turns is not None
        over: list[int] = []
        going_on: list[Answer] = []
        for answer in self.turns.episodes.answers(WAIT_S if self._is_stuck else 0.0):
            if answer.row in self.unopened:
                self.unopened.remove(answer.row)
                over += self._opened(answer)
                continue
            row = self.scheduler.outside[answer.row]
            length = row.base + 1 - row.num_prompt  # the last token that was drawn is not in the cache
            if self.turns.goes_on(answer, length):
                going_on.append(answer)
                continue
            self.scheduler.finish(answer.row)
            self.requests.lengths[answer.row - self.requests.first] = length
            over.append(answer.row)
        return over, going_on

    def _opened(self, answer: Answer) -> list[int]:
        """Queues a row that an answer opens, or ends it unopened -> the rows that are over."""
        requests, turns, row = self.requests, self.turns, answer.row
        if answer.token_ids is None:
            requests.lengths[row - requests.first] = 0
            return [row]
        assert turns is not None and turns.bits_of is not None, "answers open rows"
        turns.streams[row] = answer.stream
        requests.open(row, answer.token_ids, turns.bits_of(row, answer.stream))
        (key,) = requests.keys(range(row, row + 1))
        self.scheduler.waiting.append(Row(row, key, len(answer.token_ids), len(answer.token_ids)))
        return []

    def _resumed(self, answer: Answer) -> tuple[Row, int] | None:
        """Appends an answer to its row, and brings the row back to the batch -> the row and its number of tokens in the
        cache; None if there is no room, so that it is in the queue."""
        assert self.turns is not None and answer.token_ids is not None
        row = self.scheduler.outside[answer.row]
        cached, tokens = row.base, answer.token_ids
        most = self.turns.most_of(answer.row)
        self.requests.extend(answer.row, cached + 1 - row.num_prompt, tokens, most)
        return (row, cached) if self.scheduler.resume(answer.row, 1 + len(tokens)) is not None else None

    def _forward(self, admitted: Sequence[Admission], answered: Sequence[tuple[Row, int]] = ()) -> Tensor | None:
        """Prefills new rows and decodes the running ones -> hidden_BD of all, on the last stage. A prompt that is
        already in the cache is not computed again. answered: rows with an answer, and their tokens in the cache."""
        for moves in self.scheduler.moves:
            self.cache.move(moves)
        self.scheduler.moves.clear()
        fresh = [one for one in admitted if one.donor is None]
        drawn = [one.row.base - one.row.num_prompt for one in fresh]
        prompts = [self.requests.tokens(one.row.request, num) for one, num in zip(fresh, drawn, strict=True)]
        batch = self._batch
        more = [
            (self.requests.tokens(row.request, row.base - row.num_prompt)[cached:], cached, row.blocks)
            for row, cached in answered
        ]
        spans = [(row.request, cached, row.base) for row, cached in answered]
        spans += [(one.row.request, 0, len(prompt)) for one, prompt in zip(fresh, prompts, strict=True)]
        new = prompts, [one.row.blocks for one in fresh], more
        with self._recording(spans, admitted):
            hidden = self.decoder.round(batch.token_B, batch.cached_B, *new)
        longest = max((one.row.num_prompt for one in admitted), default=0)
        copies = [one.copy for one in admitted if one.copy is not None]
        self.cache.copy(copies, min(longest, self.cache.block_size))
        if hidden is None:
            return None
        before = len(batch) + len(answered)
        place = {one.row.request: (hidden, before + i) for i, one in enumerate(fresh)}
        self._last_hidden |= {one.row.key: place[one.row.request] for i, one in enumerate(fresh) if not drawn[i]}
        if len(fresh) == len(admitted):
            return hidden
        places = [place.get(one.row.request) or self._last_hidden[one.row.key] for one in admitted]
        return torch.cat((hidden[:before], torch.stack([hidden_ND[i] for hidden_ND, i in places])))

    @contextmanager
    def _recording(self, spans: list[Span], admitted: Sequence[Admission]) -> Iterator[None]:
        """Records the routes of a pass, and of prompts that are in the cache already. spans: what is not of running
        rows."""
        if (record := self.routes) is None:
            yield
            return
        places = record.places(self._batch.request_B, self._batch.cached_B, spans)
        self.decoder.routes = routes = record.given(places)
        yield
        record.note(places, routes)
        for one in admitted:
            if one.donor is not None:
                record.copy(self.scheduler.rows[one.donor].request, one.row.request, one.row.num_prompt)

    def _draw(self, hidden_BD: Tensor | None) -> tuple[list[Row], Tensor, Tensor]:
        """Draws a token for every row -> the rows, which of them are over (on the host, once the device is there), and
        which ended their turn."""
        batch, requests = self._batch, self.requests
        index_B = batch.request_B - requests.first
        tokens_B = torch.empty_like(batch.token_B)
        if self.parallel.is_last:
            drawn = self._sample(self.model.logits(hidden_BD, head=self._logits), batch, index_B)
            tokens_B = drawn.tokens_B
            requests.logprobs_RG[index_B, batch.drawn_B] = drawn.logprobs_B.float()
            if drawn.support_BK is not None:
                requests.support_RGK[index_B, batch.drawn_B, : drawn.support_BK.shape[1]] = drawn.support_BK
        self._from_last_stage(tokens_B)
        requests.responses_RG[index_B, batch.drawn_B] = tokens_B
        batch.token_B.copy_(tokens_B)
        batch.drawn_B += 1
        ended_B = torch.isin(tokens_B, self._eos_E)
        if requests.has_stops:
            ended_B |= self._stopped(batch)
        over_B = (ended_B | (batch.drawn_B >= batch.most_B)).to("cpu", non_blocking=True)
        return [*self.scheduler.rows], over_B, ended_B

    def _removed(self, drawn: Sequence[Row], over_B: Tensor, said_B: Tensor) -> list[int]:
        """Removes rows that are over from the batch -> their requests; those whose turn has ended wait for an answer.

        drawn: the rows of the round in which they ended. In each later round under way a token was drawn for them.
        """
        requests, more = self.requests, 1 - len(self._unread)  # the last token of a row is not in the cache
        over = {row.request for row, is_over in zip(drawn, over_B.tolist(), strict=True) if is_over}
        rows = [index for index, row in enumerate(self.scheduler.rows) if row.request in over]
        if not rows:
            return []
        said = [row for row in rows if said_B[row]] if self.turns is not None else []
        rows = [row for row in rows if row not in said]
        ended, outside = ([self.scheduler.rows[row] for row in some] for some in (rows, said))
        lengths = {row.request: self.scheduler.num_cached(row) - row.num_prompt + more for row in (*ended, *outside)}
        for row in ended:
            requests.lengths[row.request - requests.first] = lengths[row.request]
            if self.turns is not None:
                self.turns.episodes.cut(row.request, self._turn_of(row.request, lengths[row.request]))
                self.turns.cut(row.request, lengths[row.request])
        order, moves = self.scheduler.remove(rows, said)
        self.cache.move(moves)
        self._batch = self._batch.picked(order)
        if len(self._last_hidden) > 2 * self.scheduler.max_rows:
            under_way = {row.key for row in self.scheduler.rows}
            self._last_hidden = {key: place for key, place in self._last_hidden.items() if key in under_way}
        for row in outside:
            assert self.turns is not None
            end = lengths[row.request]
            self.turns.end_turn(row.request, end)
            self.turns.episodes.drew(row.request, self._turn_of(row.request, end))
        return [row.request for row in ended]

    def _turn_of(self, request: int, end: int) -> list[int]:
        """Returns what a row drew in the turn under way."""
        assert self.turns is not None
        row = request - self.requests.first
        return self.requests.responses_RG[row, self.turns.begin_of(request) : end].tolist()

    def _logits(self, hidden_BD: Tensor, weight_VD: Tensor) -> Tensor:
        """Returns the logits of the known tokens of this rank's slice, -inf for holes between them."""
        logits_BV = product(hidden_BD, self._copies.head_VD or weight_VD[: self._width])
        logits_BV = logits_BV[:, : len(self._slices[self.parallel.shard.tp_index])]
        cap_in_place(logits_BV, self.model.config.logits_cap)
        return logits_BV if self._holes_H is None else logits_BV.index_fill_(1, self._holes_H, -math.inf)

    def _sample(self, logits_BV: Tensor, batch: Batch, index_B: Tensor) -> Sampled:
        """Draws tokens for all rows, the same on all tp ranks."""
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
        """Returns the rows that have just completed one of their stop texts: bool [B]."""
        assert self.decode is not None, "stop texts need a tokenizer"
        requests = self.requests
        stops = [requests.sampling[row.request - requests.first].stop for row in self.scheduler.rows]
        reaches = [_reach(stop) for stop in stops]
        most = max(reaches, default=0)
        places_BT = batch.drawn_B[:, None] - most + torch.arange(most, device=self.device)
        drawn_BG = requests.responses_RG[batch.request_B - requests.first]
        tails = drawn_BG.gather(1, places_BT.clamp_min(0)).masked_fill(places_BT < 0, -1).tolist()  # one read for all
        stopped = []
        if self.turns is not None:  # not in what the model did not draw
            begins = [self.turns.begin_of(row.request) for row in self.scheduler.rows]
            lengths = zip(reaches, batch.drawn_B.tolist(), begins, strict=True)
            reaches = [min(reach, drawn - begin) for reach, drawn, begin in lengths]
        for stop, reach, tail in zip(stops, reaches, tails, strict=True):
            drawn = [token for token in tail[-reach:] if token >= 0] if stop else []
            stopped.append(has_stop(self.decode, drawn, stop))
        return torch.tensor(stopped, device=self.device)

    def _from_last_stage(self, x: Tensor) -> None:
        """Broadcasts x from the last stage to all stages."""
        if self.parallel.stages is not None:
            dist.broadcast(x, group_src=self.parallel.shard.pp - 1, group=self.parallel.stages)


def _reach(stop: Sequence[str]) -> int:
    """Returns the number of final tokens that are searched for stop texts: a character takes at most 4 tokens (one per
    byte), and some decoders change the first characters of a text."""
    return 4 * max(map(len, stop)) + 8 if stop else 0
