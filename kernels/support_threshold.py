"""The sampling support of rows on a GPU, without sorting: the smallest z that the rules of support.py keep.

    top-k:  the largest t with  #{v: z_v >= t} >= k
    top-p:  the largest t with  sum_{v: z_v >= t} e_v >= p x the whole

with e_v = exp(z_v - max z). The search runs over integers that have the same order as the floats (`image`), so it is
exact and terminates. Each pass over a row counts the tokens, or sums the mass, at or above PIVOTS pivots between the
bounds lo (enough) and hi (not enough), and then moves both bounds to the nearest logits. On even passes the pivots are
evenly spaced as floats, which suits logits; on odd passes as integers, which ends within 11 passes on any input. Blocks
are visited in descending order of their maxima, and only those that reach lo. The block maxima and the largest possible
mass of the tail already bound the first pass, so few blocks remain.

Bound by one read of a row per pass; typical are 3 to 6 passes over a tenth of the blocks.

Legend: B rows, V vocabulary, N blocks (of BLOCK tokens), P pivots, T tokens of a tile.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_spmd.kernels.cdf_tree import BLOCK
from rlhf_spmd.kernels.support import Rules
from rlhf_spmd.kernels.triton_import import tl, triton

TILE = 4 * BLOCK
PIVOTS = 8


class Support(NamedTuple):
    """The support of each row: tokens with image(z) >= least and z - max z >= floor; if image(z) == least, only ids up
    to last."""

    least_B: Tensor  # int32
    last_B: Tensor  # int32
    masses_BN: Tensor  # float32, of each block's supported tokens relative to max z; 0 in rows without rules
    order_BN: Tensor  # int64, blocks by descending maximum


@triton.jit
def image(z):
    """Returns a float's bits as an integer with the same order; -0 equals 0."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value(image):
    """Returns the float of an `image`."""
    bits = image.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_tile(
    row_ptr, order_ptr, start, num, vocab_size, temperature, highest, floor, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """Loads blocks order[start], order[start + 1], ... below num: ids, logits and images of their tokens [T]."""
    place_T = tl.arange(0, TILE)
    slot_T = start + place_T // BLOCK
    block_T = tl.load(order_ptr + slot_T, mask=slot_T < num, other=0).to(tl.int32)
    ids_T = block_T * BLOCK + place_T % BLOCK
    x_T = tl.load(row_ptr + ids_T, mask=(slot_T < num) & (ids_T < vocab_size), other=float("-inf")).to(tl.float32)
    z_T = tl.div_rn(x_T, temperature)
    image_T = tl.where(z_T - tl.div_rn(highest, temperature) >= floor, image(z_T), -2147483647)
    return ids_T, x_T, image_T


@triton.jit
def _search(
    row_ptr,
    order_ptr,
    block_images_N,
    vocab_size,
    temperature,
    highest,
    floor,
    goal,
    lo,
    hi,
    scale,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Returns the largest image t with at least `goal` tokens (or mass) at or above it; lo has enough, hi has not
    (int64)."""
    step_P = tl.arange(0, PIVOTS) + 1
    turn = 0
    while hi - lo > 1:
        low_value, high_value = value(lo), value(hi - 1)
        by_value_P = image(low_value + (high_value - low_value) * (step_P.to(tl.float32) / (PIVOTS + 1))).to(tl.int64)
        by_image_P = lo + (hi - lo) * step_P.to(tl.int64) // (PIVOTS + 1)
        pivot_P = tl.where(turn % 2 == 0, by_value_P, by_image_P)
        pivot_P = tl.minimum(tl.maximum(pivot_P, lo + 1), hi - 1)
        pivot32_P, lo32, hi32 = pivot_P.to(tl.int32), lo.to(tl.int32), hi.to(tl.int32)
        num = tl.sum((block_images_N >= lo32).to(tl.int32), axis=0)
        sums_P = tl.zeros([PIVOTS], tl.float64)
        nearest_lo = hi32
        nearest_hi = lo32
        for start in range(0, num, TILE // BLOCK):
            _ids_T, x_T, image_T = load_tile(
                row_ptr, order_ptr, start, num, vocab_size, temperature, highest, floor, BLOCK, TILE
            )
            weight_T = tl.exp2((x_T - highest) * scale) if BY_MASS else tl.full([TILE], 1.0, tl.float32)
            above_PT = tl.where(image_T[None, :] >= pivot32_P[:, None], weight_T[None, :], 0.0)
            sums_P += tl.sum(above_PT, axis=1).to(tl.float64)
            inside_T = (image_T >= lo32) & (image_T < hi32)
            nearest_lo = tl.minimum(nearest_lo, tl.min(tl.where(inside_T, image_T, hi32), axis=0))
            nearest_hi = tl.maximum(nearest_hi, tl.max(tl.where(inside_T, image_T, lo32), axis=0))
        enough_P = sums_P >= goal
        next_lo = tl.max(tl.where(enough_P, pivot_P, lo), axis=0)
        next_hi = tl.min(tl.where(enough_P, hi, pivot_P), axis=0)
        # no logit lies between a bound and the nearest logit, so moving the bound there changes no sum
        hi = tl.minimum(next_hi, nearest_hi.to(tl.int64) + 1)
        lo = tl.minimum(tl.maximum(next_lo, nearest_lo.to(tl.int64)), hi - 1)
        turn += 1
    return lo


@triton.jit
def _sums(
    row_ptr,
    order_ptr,
    block_images_N,
    vocab_size,
    temperature,
    highest,
    floor,
    least,
    scale,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns the mass and the number of tokens at or above the image `least`, and the number strictly above it."""
    num = tl.sum((block_images_N >= least).to(tl.int32), axis=0)
    mass = tl.full([], 0.0, tl.float64)
    count = tl.full([], 0, tl.int32)
    above = tl.full([], 0, tl.int32)
    for start in range(0, num, TILE // BLOCK):
        _ids_T, x_T, image_T = load_tile(
            row_ptr, order_ptr, start, num, vocab_size, temperature, highest, floor, BLOCK, TILE
        )
        weight_T = tl.exp2((x_T - highest) * scale)
        mass += tl.sum(tl.where(image_T >= least, weight_T, 0.0), axis=0).to(tl.float64)
        count += tl.sum((image_T >= least).to(tl.int32), axis=0)
        above += tl.sum((image_T > least).to(tl.int32), axis=0)
    return mass, count, above


@triton.jit
def _last_id(
    row_ptr,
    order_ptr,
    block_images_N,
    vocab_size,
    temperature,
    highest,
    floor,
    least,
    quota,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Returns the smallest id such that `quota` tokens with the image `least` have ids up to it."""
    num = tl.sum((block_images_N >= least).to(tl.int32), axis=0)
    step_P = tl.arange(0, PIVOTS) + 1
    lo = tl.full([], -1, tl.int64)  # too few up to here
    hi = tl.full([], 0, tl.int64) + vocab_size - 1  # enough
    while hi - lo > 1:
        pivot_P = tl.minimum(tl.maximum(lo + (hi - lo) * step_P.to(tl.int64) // (PIVOTS + 1), lo + 1), hi - 1)
        count_P = tl.zeros([PIVOTS], tl.int32)
        for start in range(0, num, TILE // BLOCK):
            ids_T, _x_T, image_T = load_tile(
                row_ptr, order_ptr, start, num, vocab_size, temperature, highest, floor, BLOCK, TILE
            )
            before_PT = (image_T == least)[None, :] & (ids_T[None, :] <= pivot_P.to(tl.int32)[:, None])
            count_P += tl.sum(before_PT.to(tl.int32), axis=1)
        enough_P = count_P >= quota
        next_hi = tl.min(tl.where(enough_P, pivot_P, hi), axis=0)
        lo = tl.max(tl.where(enough_P, lo, pivot_P), axis=0)
        hi = next_hi
    return hi


@triton.jit
def _limited(
    row_ptr,
    order_ptr,
    nth_ptr,
    block_images_N,
    vocab_size,
    num_blocks,
    temperature,
    highest,
    floor,
    limit,
    least,
    scale,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Returns (least, last) with at most `limit` tokens: raises `least`, then cuts its ties after the id `last`."""
    last = tl.full([], 0, tl.int64) + vocab_size - 1
    _mass, count, above = _sums(
        row_ptr, order_ptr, block_images_N, vocab_size, temperature, highest, floor, least.to(tl.int32), scale,
        BLOCK, TILE,
    )  # fmt: skip
    if count > limit:
        nth = tl.load(nth_ptr, mask=limit <= num_blocks, other=float("-inf"))
        nth_z = tl.div_rn(nth, temperature)
        bound = tl.where(nth_z - tl.div_rn(highest, temperature) >= floor, image(nth_z), -2147483647).to(tl.int64)
        top = image(tl.div_rn(highest, temperature)).to(tl.int64)
        least = _search(
            row_ptr, order_ptr, block_images_N, vocab_size, temperature, highest, floor, limit.to(tl.float64),
            tl.maximum(bound, least), top + 1, scale, False, BLOCK, TILE, PIVOTS,
        )  # fmt: skip
        _mass, count, above = _sums(
            row_ptr, order_ptr, block_images_N, vocab_size, temperature, highest, floor, least.to(tl.int32), scale,
            BLOCK, TILE,
        )  # fmt: skip
        if count > limit:
            last = _last_id(
                row_ptr, order_ptr, block_images_N, vocab_size, temperature, highest, floor, least.to(tl.int32),
                limit.to(tl.int32) - above, BLOCK, TILE, PIVOTS,
            )  # fmt: skip
    return least, last


@triton.jit
def _store_masses(
    support_mass_ptr,
    row_ptr,
    order_ptr,
    num,
    vocab_size,
    temperature,
    highest,
    floor,
    least,
    last,
    scale,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Stores the supported mass of the first `num` blocks in the order."""
    slots = tl.arange(0, TILE // BLOCK)
    for start in range(0, num, TILE // BLOCK):
        ids_T, x_T, image_T = load_tile(
            row_ptr, order_ptr, start, num, vocab_size, temperature, highest, floor, BLOCK, TILE
        )
        inside_T = (image_T > least) | ((image_T == least) & (ids_T <= last))
        mass_T = tl.where(inside_T, tl.exp2((x_T - highest) * scale), 0.0)
        mass = tl.sum(tl.reshape(mass_T, [TILE // BLOCK, BLOCK]), axis=1)
        block = tl.load(order_ptr + start + slots, mask=start + slots < num, other=0)
        tl.store(support_mass_ptr + block, mass, mask=start + slots < num)


@triton.jit
def _threshold_kernel(
    # pointers
    logits_ptr,  # [B, V]
    temperature_ptr,  # [B]
    top_k_ptr,  # [B]
    top_p_ptr,  # [B]
    floor_ptr,  # [B]
    limit_ptr,  # [B]
    block_max_ptr,  # [B, N], the largest first
    order_ptr,  # [B, N]
    total_ptr,  # [B]
    least_ptr,  # [B]
    last_ptr,  # [B]
    support_mass_ptr,  # [B, N]
    # sizes
    vocab_size,
    num_blocks,
    # strides
    stride_lb,
    # meta
    LEAVES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_lb
    order_ptr += row * num_blocks
    block_max_ptr += row * num_blocks
    temperature, total = tl.load(temperature_ptr + row), tl.load(total_ptr + row)
    top_k, limit = tl.load(top_k_ptr + row), tl.load(limit_ptr + row)
    top_p, floor = tl.load(top_p_ptr + row), tl.load(floor_ptr + row)
    scale = 1.4426950408889634 / temperature  # log2 e
    leaf_N = tl.arange(0, LEAVES)
    block_max_N = tl.load(block_max_ptr + leaf_N, mask=leaf_N < num_blocks, other=float("-inf"))
    block_images_N = image(tl.div_rn(block_max_N, temperature))
    highest = tl.load(block_max_ptr)
    highest_z = tl.div_rn(highest, temperature)
    top = image(highest_z).to(tl.int64)
    least = tl.full([], -2139095040, tl.int64)  # the image of the smallest finite float
    last = tl.full([], 0, tl.int64) + vocab_size - 1
    restricted = (top_k < vocab_size) | (limit < vocab_size) | (top_p < 1.0) | (floor > float("-inf"))
    if restricted & (total > 0.0):  # the total of a broken row is NaN
        if top_k < vocab_size:
            kth = tl.load(block_max_ptr + top_k - 1, mask=top_k <= num_blocks, other=float("-inf"))
            lo = tl.maximum(image(tl.div_rn(kth, temperature)).to(tl.int64), least)
            least = _search(
                row_ptr, order_ptr, block_images_N, vocab_size, temperature, highest, float("-inf"),
                top_k.to(tl.float64), lo, top + 1, scale, False, BLOCK, TILE, PIVOTS,
            )  # fmt: skip
        if top_p < 1.0:
            whole = total
            if top_k < vocab_size:
                whole, _count, _above = _sums(
                    row_ptr, order_ptr, block_images_N, vocab_size, temperature, highest, float("-inf"),
                    least.to(tl.int32), scale, BLOCK, TILE,
                )  # fmt: skip
            # all tokens below this together hold less than 1 - p, even if they were the whole vocabulary
            tail = highest_z + tl.log(((1.0 - top_p) * whole / vocab_size).to(tl.float32))
            bound = image(tail - 0.001 - tl.abs(highest_z) * 1e-6).to(tl.int64)
            least = _search(
                row_ptr, order_ptr, block_images_N, vocab_size, temperature, highest, float("-inf"),
                top_p * whole, tl.minimum(tl.maximum(bound, least), top), top + 1, scale, True, BLOCK, TILE, PIVOTS,
            )  # fmt: skip
        if limit < vocab_size:
            least, last = _limited(
                row_ptr, order_ptr, block_max_ptr + limit - 1, block_images_N, vocab_size, num_blocks, temperature,
                highest, floor, limit, least, scale, BLOCK, TILE, PIVOTS,
            )  # fmt: skip
        num = tl.sum((block_images_N >= least.to(tl.int32)).to(tl.int32), axis=0)
        _store_masses(
            support_mass_ptr + row * num_blocks, row_ptr, order_ptr, num, vocab_size, temperature, highest, floor,
            least.to(tl.int32), last.to(tl.int32), scale, BLOCK, TILE,
        )  # fmt: skip
    tl.store(least_ptr + row, least.to(tl.int32))
    tl.store(last_ptr + row, last.to(tl.int32))


def threshold_triton(
    logits_BV: Tensor, rules: Rules, block_max_BN: Tensor, total_B: Tensor, num_leaves: int
) -> tuple[Support, Tensor]:
    """Returns the support, and the block maxima in descending order.

    total_B: mass of a row relative to its max, float64.
    """
    num_rows, vocab_size = logits_BV.shape
    num_blocks = block_max_BN.shape[1]
    assert logits_BV.stride(1) == 1 and block_max_BN.is_contiguous() and num_leaves >= num_blocks
    assert rules.temperature_B.dtype == torch.float32 and total_B.dtype == torch.float64
    sorted_BN, order_BN = block_max_BN.sort(dim=1, descending=True)
    sorted_BN, order_BN = sorted_BN.contiguous(), order_BN.contiguous()
    least_B = torch.empty(num_rows, dtype=torch.int32, device=logits_BV.device)
    support = Support(least_B, torch.empty_like(least_B), torch.zeros_like(block_max_BN), order_BN)
    _threshold_kernel[(num_rows,)](
        logits_BV, rules.temperature_B, rules.top_k_B, rules.top_p_B, rules.floor_B, rules.limit_B,
        sorted_BN, order_BN, total_B, support.least_B, support.last_B, support.masses_BN,
        vocab_size, num_blocks, logits_BV.stride(0), LEAVES=num_leaves, BLOCK=BLOCK, TILE=TILE, PIVOTS=PIVOTS,
        num_warps=8,
    )  # fmt: skip
    return support, sorted_BN
