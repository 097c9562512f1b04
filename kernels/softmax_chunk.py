"""Softmax over a chunk of logits: the statistics of each row that suffice to merge chunks, and the logits' gradients.

    z = logits / temperature,   highest = max z,   total = sum exp(z - highest),   token = z_t,
    weighted = sum exp(z - highest) (z - highest)

These merge over the chunks c of a row (Milakov and Gimelshein, arXiv 1805.02867): with s_c = highest_c - max_c
highest_c,

    highest' = max_c highest_c,   total' = sum_c exp(s_c) total_c,   token' = sum_c token_c,
    weighted' = sum_c exp(s_c) (weighted_c + s_c total_c)

Then logprob = token' - highest' - log total' and entropy = log total' - weighted' / total'. With g and e the gradients
of logprob and entropy, log_total = highest' + log total', and p = exp(z - log_total):

    d logits_nv = (g_n ([v = t] - p_nv) - e_n p_nv (log p_nv + entropy_n)) / temperature

Statistics and gradients each take one pass over the chunk.

Legend: N rows, C columns (tokens of the vocabulary), R rows of a piece.
"""

import math

import torch
from torch import Tensor

from rlhf_spmd.kernels.triton_import import tl, triton

CACHED_BYTES = 2 * 2**20  # of float32 numbers that a CPU processes at a time, so that they stay in its cache
LOWEST = -1e30  # used for log 0 where it is multiplied by 0
BLOCK, WARPS = 4096, 8  # columns per step of the Triton kernels
HIGHEST, TOTAL, WEIGHTED, TOKEN = range(4)  # a row's statistics

# ---- plain torch ----------------------------------------------------------------------------------------------------


def _pieces(logits_NC: Tensor) -> list[slice]:
    """Yields slices of rows that fit a CPU's cache; a GPU takes all rows at once."""
    rows = len(logits_NC) if logits_NC.is_cuda else CACHED_BYTES // (4 * logits_NC.shape[1])
    rows = max(rows, 1)
    return [slice(start, start + rows) for start in range(0, len(logits_NC), rows)]


def divide_by_temperature(logits_RC: Tensor, temperature: float) -> Tensor:
    """Returns logits / temperature in at least float32; the tensor itself if that changes nothing."""
    z_RC = logits_RC.to(torch.promote_types(logits_RC.dtype, torch.float32))
    return z_RC if temperature == 1.0 else z_RC / temperature


def statistics_ref(logits_NC: Tensor, tokens_N: Tensor, *, temperature: float, entropy: bool) -> Tensor:
    """Returns (highest, total, weighted, token) of each row: [4, N], at least float32.

    tokens_N: columns of the chunk; `token` is 0 for a token outside the chunk.
    entropy: without it, weighted is 0.
    """
    wide = torch.promote_types(logits_NC.dtype, torch.float32)
    statistics_4N = torch.zeros(4, len(logits_NC), dtype=wide, device=logits_NC.device)
    for piece in _pieces(logits_NC):
        z_RC = divide_by_temperature(logits_NC[piece], temperature)
        highest_R = z_RC.amax(1)
        # A row of -inf only has the total 0, not NaN.
        shifted_RC = z_RC - highest_R.masked_fill(highest_R == -math.inf, 0.0)[:, None]
        exp_RC = shifted_RC.exp() if entropy else shifted_RC.exp_()
        statistics_4N[HIGHEST, piece], statistics_4N[TOTAL, piece] = highest_R, exp_RC.sum(1)
        if entropy:  # x exp(x) is 0 at -inf
            statistics_4N[WEIGHTED, piece] = shifted_RC.clamp_(min=LOWEST).mul_(exp_RC).sum(1)
    inside_N, column_N1 = _inside(tokens_N, logits_NC.shape[1])
    token_N = divide_by_temperature(logits_NC.gather(1, column_N1)[:, 0], temperature)
    statistics_4N[TOKEN] = torch.where(inside_N, token_N, 0.0)
    return statistics_4N


def gradients_ref(
    logits_NC: Tensor,
    tokens_N: Tensor,
    log_total_N: Tensor,
    grad_N: Tensor,
    entropy_N: Tensor | None = None,
    grad_entropy_N: Tensor | None = None,
    *,
    temperature: float,
    out: Tensor,
) -> Tensor:
    """Computes the logits' gradients, written to `out` (which may be the logits): [N, C].

    log_total_N: highest + log total over the whole vocabulary; +inf for a row without token.
    entropy_N, grad_entropy_N: None if entropy was not requested.
    """
    grad_N = grad_N / temperature
    for piece in _pieces(logits_NC):
        z_RC, out_RC = divide_by_temperature(logits_NC[piece], temperature), out[piece]
        if grad_entropy_N is None or entropy_N is None:
            to = out_RC if out_RC.dtype == z_RC.dtype else None
            part_RC = torch.sub(z_RC, log_total_N[piece, None], out=to).exp_().mul_(-grad_N[piece, None])
        else:
            logprobs_RC = z_RC - log_total_N[piece, None]
            part_RC = logprobs_RC.exp()
            logprobs_RC.clamp_(min=LOWEST).add_(entropy_N[piece, None])
            slope_RC = logprobs_RC.mul_(grad_entropy_N[piece, None] / temperature).add_(grad_N[piece, None])
            part_RC.mul_(slope_RC).neg_()
        inside_R, column_R1 = _inside(tokens_N[piece], logits_NC.shape[1])
        part_RC.scatter_add_(1, column_R1, torch.where(inside_R, grad_N[piece], 0.0)[:, None])
        if part_RC.data_ptr() != out_RC.data_ptr():
            out_RC.copy_(part_RC)
    return out


def _inside(tokens_N: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Returns which tokens are columns of the chunk, and an index [N, 1] for gather, clamped into range."""
    return (tokens_N >= 0) & (tokens_N < num_columns), tokens_N.clamp(0, num_columns - 1)[:, None]


# ---- Triton ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows"])
def _statistics_kernel(
    # pointers
    logits_NC,
    tokens_N,
    statistics_4N,
    # sizes
    num_rows,
    num_columns,
    temperature,
    # strides
    logits_stride,
    # meta
    ENTROPY: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Runs one program per row: one pass with a running maximum."""
    row = tl.program_id(0).to(tl.int64)
    logits_C = logits_NC + row * logits_stride
    highest = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    weighted = tl.full([], 0.0, tl.float32)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(logits_C + columns, mask=columns < num_columns, other=-float("inf")).to(tl.float32) / temperature
        newer = tl.maximum(highest, tl.max(z, 0))
        base = tl.where(newer == -float("inf"), 0.0, newer)  # -inf - -inf would be NaN
        shift = tl.where(highest == -float("inf"), 0.0, highest - base)
        rescale = tl.exp(shift)  # of sums relative to the previous maximum; they are 0 while it is -inf
        exp = tl.exp(z - base)
        if ENTROPY:
            product = exp * tl.maximum(z - base, LOWEST)  # x exp(x) is 0 at -inf
            weighted = rescale * (weighted + shift * total) + tl.sum(product, 0)
        total = rescale * total + tl.sum(exp, 0)
        highest = newer
    token = tl.load(tokens_N + row)
    inside = (token >= 0) & (token < num_columns)
    z_token = tl.load(logits_C + token, mask=inside, other=0.0).to(tl.float32) / temperature
    tl.store(statistics_4N + row, highest)
    tl.store(statistics_4N + num_rows + row, total)
    tl.store(statistics_4N + 2 * num_rows + row, weighted)
    tl.store(statistics_4N + 3 * num_rows + row, z_token)


def statistics_triton(logits_NC: Tensor, tokens_N: Tensor, *, temperature: float, entropy: bool) -> Tensor:
    """Computes statistics_ref, in float32."""
    num_rows, num_columns = logits_NC.shape
    assert logits_NC.stride(1) == 1 and logits_NC.dtype != torch.float64
    assert tokens_N.shape == (num_rows,) and tokens_N.dtype == torch.int64 and tokens_N.is_contiguous()
    statistics_4N = torch.empty(4, num_rows, dtype=torch.float32, device=logits_NC.device)
    if num_rows:
        _statistics_kernel[(num_rows,)](
            logits_NC,
            tokens_N,
            statistics_4N,
            num_rows,
            num_columns,
            temperature,
            logits_NC.stride(0),
            ENTROPY=entropy,
            LOWEST=LOWEST,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return statistics_4N


@triton.jit
def _gradients_kernel(
    # pointers
    logits_NC,
    out_NC,
    tokens_N,
    log_total_N,
    grad_N,
    entropy_N,
    grad_entropy_N,
    # sizes
    num_columns,
    temperature,
    # strides
    logits_stride,
    out_stride,
    # meta
    ENTROPY: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Runs one program per row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    z = tl.load(logits_NC + row * logits_stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
    logprob = z / temperature - tl.load(log_total_N + row)
    p = tl.exp(logprob)
    grad = tl.load(grad_N + row)
    slope = p * grad
    if ENTROPY:
        surprise = tl.maximum(logprob, LOWEST) + tl.load(entropy_N + row)
        slope += tl.load(grad_entropy_N + row) * p * surprise
    z_grad = tl.where(columns == tl.load(tokens_N + row), grad, 0.0) - slope
    out = out_NC + row * out_stride + columns
    tl.store(out, (z_grad / temperature).to(out_NC.dtype.element_ty), mask=inside)


def gradients_triton(
    logits_NC: Tensor,
    tokens_N: Tensor,
    log_total_N: Tensor,
    grad_N: Tensor,
    entropy_N: Tensor | None = None,
    grad_entropy_N: Tensor | None = None,
    *,
    temperature: float,
    out: Tensor,
) -> Tensor:
    """Computes gradients_ref in float32."""
    num_rows, num_columns = logits_NC.shape
    assert logits_NC.stride(1) == out.stride(1) == 1 and out.shape == logits_NC.shape
    assert logits_NC.dtype != torch.float64 and tokens_N.dtype == torch.int64
    of_rows = [x for x in (log_total_N, grad_N, entropy_N, grad_entropy_N) if x is not None]
    assert all(x.dtype == torch.float32 for x in of_rows)
    assert all(x.shape == (num_rows,) and x.is_contiguous() for x in (tokens_N, *of_rows))
    if num_rows:
        _gradients_kernel[(num_rows, triton.cdiv(num_columns, BLOCK))](
            logits_NC,
            out,
            tokens_N,
            log_total_N,
            grad_N,
            grad_N if entropy_N is None else entropy_N,  # not read
            grad_N if grad_entropy_N is None else grad_entropy_N,
            num_columns,
            temperature,
            logits_NC.stride(0),
            out.stride(0),
            ENTROPY=grad_entropy_N is not None,
            LOWEST=LOWEST,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return out
