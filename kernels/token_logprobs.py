"""Log-probabilities of given tokens from hidden states: output projection, softmax and gather fused.

    z_nv = h_n . w_v / temperature,   logprob_n = z_nt - log sum_v exp z_nv,   entropy_n = -sum_v p_nv log p_nv

The logits [N, V] would be the largest tensor of a training step. Here only C columns of them exist at a time. Each
chunk leaves four numbers per row, which are merged over chunks and, with tensor parallelism, over the ranks' slices of
the vocabulary by the same rule (softmax_chunk.py). The backward pass recomputes a chunk's logits (a fourth matrix
product; a single chunk is saved instead) and turns them into gradients in place.

Chunks are columns, not rows: each yields a complete part of the weight's gradient, and only [N, D] is summed over
chunks, in float32. (Cut Cross-Entropy, arXiv 2411.09009, does all this inside the kernel of the matrix product.)

A cap bounds logits before temperature (soft_cap.py); their gradients then have a factor.

Legend: N tokens, D hidden, V vocabulary (this rank's slice of it), C a chunk of V, K tokens of the support.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_spmd.kernels.known_tokens import TILE, KnownTokens
from rlhf_spmd.kernels.products import product_in
from rlhf_spmd.kernels.soft_cap import cap_in_place, capped, slope
from rlhf_spmd.kernels.softmax_chunk import (
    HIGHEST,
    TOKEN,
    TOTAL,
    WEIGHTED,
    divide_by_temperature,
    gradients_ref,
    gradients_triton,
    statistics_ref,
    statistics_triton,
)

CHUNK_BYTES = 32 * 2**20  # of a chunk's logits, counted as float32; see columns_per_chunk
MOST_CHUNKS = 24  # with fewer columns than V / 24, sums over chunks would cost more than is saved

Banned = tuple[tuple[int, ...], Tensor]  # token ids, and early_N (bool): the rows in which they are banned


def columns_per_chunk(num_rows: int, vocab_size: int) -> int:
    """Returns the columns C of a chunk: as many as fit CHUNK_BYTES, at least V / MOST_CHUNKS."""
    least = -(-vocab_size // MOST_CHUNKS)
    columns = max(CHUNK_BYTES // (4 * max(num_rows, 1)), least)
    return min(-(-columns // TILE) * TILE, vocab_size)


def kinds_of_widths(vocab_size: int) -> list[int]:
    """Returns numbers of columns, one for each kind of chunk that Triton compiles a kernel of its own for (1, multiples
    of 16 and all others), for any number of rows. The last chunk has what whole tiles leave."""
    whole, rest = vocab_size - vocab_size % TILE, vocab_size % TILE
    kinds = {(size == 1, size % 16 == 0): size for size in (vocab_size, rest, whole) if size}
    return list(kinds.values())


# ---- the reference: holds [N, V] and leaves the gradient to autograd -------------------------------------------------


def token_logprobs_ref(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    tokens_N: Tensor,
    *,
    temperature: float = 1.0,
    banned: Banned | None = None,
    support_NK: Tensor | None = None,
    known: KnownTokens | None = None,
    entropy: bool = False,
    top: bool = False,
    cap: float | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Computes what token_logprobs does, for the whole vocabulary."""
    logits_NV = capped(hidden_ND @ weight_VD.T, cap)
    z_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
    real_N = tokens_N >= 0
    possible_NV = torch.ones_like(z_NV, dtype=torch.bool)
    if support_NK is not None:
        ids_NK = torch.where(support_NK >= 0, support_NK, len(weight_VD)).long()  # padding: an extra column
        possible_NV = torch.zeros(len(z_NV), len(weight_VD) + 1, dtype=torch.bool, device=z_NV.device)
        possible_NV = possible_NV.scatter_(1, ids_NK, True)[:, :-1] | ~real_N[:, None]
    if banned is not None:
        ids_V = torch.zeros(len(weight_VD), dtype=torch.bool, device=z_NV.device)
        ids_V[list(banned[0])] = True
        possible_NV = possible_NV & ~(banned[1][:, None] & ids_V)
    if known is not None:
        possible_NV[:, known.missing(len(weight_VD))] = False
    logprobs_NV = z_NV.masked_fill(~possible_NV, -math.inf).log_softmax(1)
    logprobs_N = logprobs_NV.gather(1, tokens_N.clamp(min=0)[:, None])[:, 0]
    logprobs_N = torch.where(real_N, logprobs_N, 0.0)
    summand_NV = logprobs_NV.exp() * logprobs_NV.masked_fill(~possible_NV, 0.0)
    top_N = real_N & (logprobs_N >= logprobs_NV.amax(1))
    return _asked(logprobs_N, torch.where(real_N, -summand_NV.sum(1), 0.0) if entropy else None, top_N if top else None)


def _asked(logprobs_N: Tensor, *others: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    """Returns logprobs, and what else was asked for."""
    found = (logprobs_N, *(one for one in others if one is not None))
    return found if len(found) > 1 else logprobs_N


# ---- all chunks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Settings:
    """Arguments that are not differentiated."""

    temperature: float
    banned: Banned | None
    known: KnownTokens | None
    entropy: bool
    first: int  # this rank's slice of the vocabulary begins with this token
    group: dist.ProcessGroup | None
    cap: float | None
    triton: bool

    def chunks(self, num_rows: int, vocab_size: int) -> list[range]:
        """Returns the columns of this rank's slice that hold known tokens, in chunks; there may be none."""
        width = vocab_size
        if self.known is not None:
            width = self.known.width(range(self.first, self.first + vocab_size))
        columns = max(columns_per_chunk(num_rows, width), 1)
        return [range(start, min(start + columns, width)) for start in range(0, width, columns)]

    def logits(self, hidden_ND: Tensor, weight_VD: Tensor, columns: range, out_NC: Tensor) -> Tensor:
        """Returns the logits of a chunk before temperature, in the model's dtype as in generation; banned tokens are
        -inf. They lie in out_NC, or in memory of their own."""
        logits_NC = product_in(out_NC, hidden_ND, weight_VD[columns.start : columns.stop])
        return self.ban(cap_in_place(logits_NC, self.cap), columns, -math.inf)

    def ban(self, x_NC: Tensor, columns: range, value: float) -> Tensor:
        if self.known is not None:
            self.known.fill_(x_NC, range(self.first + columns.start, self.first + columns.stop), value)
        ids, early_N = self.banned or ((), None)
        for column in (token - self.first - columns.start for token in ids):
            if 0 <= column < len(columns):
                x_NC[:, column].masked_fill_(early_N, value)
        return x_NC

    def statistics(self, logits_NC: Tensor, tokens_N: Tensor, *, temperature: float) -> Tensor:
        run = statistics_triton if self.triton else statistics_ref
        return run(logits_NC, tokens_N, temperature=temperature, entropy=self.entropy)

    def gradients(self, logits: Tensor, *arguments: Tensor | None, temperature: float, out: Tensor) -> Tensor:
        run = gradients_triton if self.triton else gradients_ref
        if self.cap is None:
            return run(logits, *arguments, temperature=temperature, out=out)
        slopes = slope(logits, self.cap * temperature / self.temperature)  # of a support: divided already
        return run(logits, *arguments, temperature=temperature, out=out).mul_(slopes)

    def merged(self, parts: list[Tensor]) -> Tensor:
        """Returns the statistics [4, N] of all chunks of all ranks."""
        parts_C4N = torch.stack(parts)
        highest_CN = parts_C4N[:, HIGHEST]
        highest_N = highest_CN.amax(0)
        if self.group is not None:
            dist.all_reduce(highest_N, op=dist.ReduceOp.MAX, group=self.group)
        shift_CN = torch.where(highest_CN > -math.inf, highest_CN - highest_N, 0.0)  # totals are 0 there
        scale_CN = shift_CN.exp()
        sums_4N = torch.zeros_like(parts_C4N[0])
        sums_4N[TOTAL] = (scale_CN * parts_C4N[:, TOTAL]).sum(0)
        sums_4N[WEIGHTED] = (scale_CN * (parts_C4N[:, WEIGHTED] + shift_CN * parts_C4N[:, TOTAL])).sum(0)
        sums_4N[TOKEN] = parts_C4N[:, TOKEN].sum(0)  # all but the owner add 0
        if self.group is not None:
            dist.all_reduce(sums_4N[TOTAL:], group=self.group)
        sums_4N[HIGHEST] = highest_N
        return sums_4N


def _buffer(hidden_ND: Tensor, chunks: list[range]) -> Tensor:
    """Returns the memory that all chunks share."""
    return hidden_ND.new_empty(len(hidden_ND) * max(map(len, chunks), default=0))


def _view(buffer: Tensor, num_rows: int, columns: range) -> Tensor:
    """Returns a view [N, C] of the memory that all chunks share."""
    return buffer[: num_rows * len(columns)].view(num_rows, len(columns))


def _nothing(hidden_ND: Tensor) -> Tensor:
    """Returns the statistics [4, N] of a slice without known tokens."""
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    statistics_4N = torch.zeros(4, len(hidden_ND), dtype=wide, device=hidden_ND.device)
    statistics_4N[HIGHEST] = -math.inf
    return statistics_4N


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, tokens_N, support_NK, how: _Settings):
        (num_rows, _), vocab_size = hidden_ND.shape, len(weight_VD)
        chunks = how.chunks(num_rows, vocab_size)
        buffer = _buffer(hidden_ND, chunks)
        local_N, candidates_NK, member_N, parts = tokens_N - how.first, None, None, []
        if support_NK is not None:
            is_token_NK = support_NK == tokens_N[:, None]
            support_NK = torch.where(support_NK >= 0, support_NK.to(torch.int64) - how.first, -1)
            wide = torch.promote_types(hidden_ND.dtype, torch.float32)
            candidates_NK = torch.full(support_NK.shape, -math.inf, dtype=wide, device=hidden_ND.device)
        for columns in chunks:
            logits_NC = how.logits(hidden_ND, weight_VD, columns, _view(buffer, num_rows, columns))
            if support_NK is None:
                parts.append(how.statistics(logits_NC, local_N - columns.start, temperature=how.temperature))
            else:
                inside_NK = (support_NK >= columns.start) & (support_NK < columns.stop)
                index_NK = (support_NK - columns.start).clamp(0, len(columns) - 1)
                z_NK = divide_by_temperature(logits_NC.gather(1, index_NK), how.temperature)
                candidates_NK = torch.where(inside_NK, z_NK, candidates_NK)
        if support_NK is not None:  # the support replaces the vocabulary, the index in it local_N
            member_N = is_token_NK.any(1)
            mine_N = member_N & (local_N >= 0) & (local_N < vocab_size)
            local_N = torch.where(mine_N, is_token_NK.int().argmax(1), -1)
            parts.append(how.statistics(candidates_NK, local_N, temperature=1.0))
        highest_N, total_N, weighted_N, token_N = how.merged(parts or [_nothing(hidden_ND)])
        log_N, real_N = total_N.log(), tokens_N >= 0
        logprobs_N = torch.where(real_N, token_N - highest_N - log_N, 0.0)
        if member_N is not None:
            logprobs_N = logprobs_N.masked_fill(real_N & ~member_N, -math.inf)
        if how.known is not None:  # no rank has such a column
            logprobs_N = logprobs_N.masked_fill(tokens_N >= how.known.stop, -math.inf)
        entropy_N = torch.where(real_N, log_N - weighted_N / total_N, 0.0) if how.entropy else None
        top_N = real_N & (token_N >= highest_N)
        top_N &= True if member_N is None else member_N
        log_total_N = torch.where(real_N, highest_N + log_N, math.inf)  # a row without token has p = 0
        saved_NC = logits_NC if len(chunks) == 1 and support_NK is None else None
        ctx.how = how
        ctx.save_for_backward(
            hidden_ND, weight_VD, local_N, support_NK, candidates_NK, saved_NC, real_N, log_total_N, entropy_N
        )
        ctx.mark_non_differentiable(top_N)
        return logprobs_N, entropy_N, top_N

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_N, grad_entropy_N, _):
        hidden_ND, weight_VD, local_N, support_NK, candidates_NK, saved_NC, real_N, log_total_N, entropy_N = (
            ctx.saved_tensors
        )
        how, (wants_hidden, wants_weight, *_) = ctx.how, ctx.needs_input_grad
        num_rows, chunks = len(hidden_ND), how.chunks(len(hidden_ND), len(weight_VD))
        grads = [None if x is None else torch.where(real_N, x, 0.0) for x in (grad_N, entropy_N, grad_entropy_N)]
        buffer = _buffer(hidden_ND, chunks)
        weight_grad_VD = torch.empty_like(weight_VD) if wants_weight else None
        if wants_weight:
            weight_grad_VD[chunks[-1].stop if chunks else 0 :].zero_()  # rows without a token
        wide = torch.promote_types(hidden_ND.dtype, torch.float32) if len(chunks) > 1 else hidden_ND.dtype
        hidden_grad_ND = torch.zeros(hidden_ND.shape, dtype=wide, device=hidden_ND.device) if wants_hidden else None
        if support_NK is not None:
            out_NK = torch.empty_like(candidates_NK)
            support_grad_NK = how.gradients(candidates_NK, local_N, log_total_N, *grads, temperature=1.0, out=out_NK)
            support_grad_NK = (support_grad_NK / how.temperature).to(hidden_ND.dtype)
        for columns in chunks:
            out_NC = _view(buffer, num_rows, columns)
            if support_NK is None:
                logits_NC, token_N = saved_NC, local_N - columns.start
                if saved_NC is None:
                    out_NC = logits_NC = how.logits(hidden_ND, weight_VD, columns, out_NC)
                how.gradients(logits_NC, token_N, log_total_N, *grads, temperature=how.temperature, out=out_NC)
            else:
                inside_NK = (support_NK >= columns.start) & (support_NK < columns.stop)
                index_NK = (support_NK - columns.start).clamp(0, len(columns) - 1)
                out_NC.zero_().scatter_add_(1, index_NK, torch.where(inside_NK, support_grad_NK, 0.0))
            how.ban(out_NC, columns, 0.0)
            part_CD = weight_VD[columns.start : columns.stop]
            if wants_weight:
                torch.mm(out_NC.T, hidden_ND, out=weight_grad_VD[columns.start : columns.stop])
            if wants_hidden and wide == hidden_ND.dtype:
                hidden_grad_ND.addmm_(out_NC, part_CD)
            elif wants_hidden:
                hidden_grad_ND += out_NC @ part_CD
        if wants_hidden:
            hidden_grad_ND = hidden_grad_ND.to(hidden_ND.dtype)
        return hidden_grad_ND, weight_grad_VD, None, None, None


def token_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    tokens_N: Tensor,
    *,
    temperature: float = 1.0,
    banned: Banned | None = None,
    support_NK: Tensor | None = None,
    known: KnownTokens | None = None,
    entropy: bool = False,
    top: bool = False,
    cap: float | None = None,
    first: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Returns the tokens' logprobs_N under softmax(hidden weight^T / temperature) and, on request, its entropy_N: at
    least float32, differentiable once; 0 without gradient where the token is -1.

    banned: (token ids, early_N bool): these tokens have probability 0 in those rows.
    support_NK: the support of each token (ids, padded with -1), to which the distribution is restricted.
    known: all other tokens have probability 0 in all rows; None: all are known.
    top: also returns whether no token was more likely, bool [N].
    cap: of logits, before temperature; None: none.
    first, group: weight_VD is the slice of the vocabulary that begins with token `first`; the other ranks of the group
        hold the other slices and the same hidden_ND.

    All ranks get the same results and must use them identically: the backward pass sends no message, and each rank's
    gradient of hidden_ND is a partial sum.
    """
    on_gpu = hidden_ND.is_cuda and hidden_ND.dtype != torch.float64
    how = _Settings(temperature, banned, known, entropy, first, group, cap, triton=on_gpu)
    return _run(hidden_ND, weight_VD, tokens_N, support_NK, how, top=top)


def token_logprobs_triton(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    tokens_N: Tensor,
    *,
    temperature: float = 1.0,
    banned: Banned | None = None,
    support_NK: Tensor | None = None,
    known: KnownTokens | None = None,
    entropy: bool = False,
    top: bool = False,
    cap: float | None = None,
    first: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Computes token_logprobs by the Triton kernels, wherever the tensors are."""
    how = _Settings(temperature, banned, known, entropy, first, group, cap, triton=True)
    return _run(hidden_ND, weight_VD, tokens_N, support_NK, how, top=top)


def _run(
    hidden_ND: Tensor, weight_VD: Tensor, tokens_N: Tensor, support_NK: Tensor | None, how: _Settings, *, top: bool
) -> Tensor | tuple[Tensor, ...]:
    assert how.temperature > 0
    assert hidden_ND.dtype == weight_VD.dtype and hidden_ND.shape[1] == weight_VD.shape[1]
    assert tokens_N.shape == hidden_ND.shape[:1] and (support_NK is None or support_NK.shape[:1] == tokens_N.shape)
    logprobs_N, entropy_N, top_N = _TokenLogprobs.apply(hidden_ND, weight_VD, tokens_N.contiguous(), support_NK, how)
    return _asked(logprobs_N, entropy_N if how.entropy else None, top_N if top else None)
