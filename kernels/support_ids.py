"""The sampling support of rows as lists of ids, the most likely token first. Training stores these lists and replays
them.

    key_v = image(z_v) * 2^32 + (2^32 - 1 - v)

One pass over the blocks that reach the threshold writes the keys of the supported tokens in any order; then these short
lists are sorted. Descending keys are descending z, with ties by id. Bound by one read of those blocks.

Legend: B rows, V vocabulary, N blocks, T tokens of a tile, K stored tokens.
"""

import torch
from torch import Tensor

from rlhf_spmd.kernels.cdf_tree import BLOCK
from rlhf_spmd.kernels.support import Rules
from rlhf_spmd.kernels.support_threshold import TILE, Support, image, load_tile
from rlhf_spmd.kernels.triton_import import tl, triton

EMPTY = -(2**63)  # below every key


@triton.jit
def _collect_kernel(
    # pointers
    logits_ptr,  # [B, V]
    temperature_ptr,  # [B]
    floor_ptr,  # [B]
    block_max_ptr,  # [B, N], the largest first
    order_ptr,  # [B, N]
    least_ptr,  # [B]
    last_ptr,  # [B]
    keys_ptr,  # [B, K]
    # sizes
    vocab_size,
    num_blocks,
    num_stored,
    # strides
    stride_lb,
    # meta
    LEAVES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Collects the keys of the supported tokens, in any order."""
    row = tl.program_id(0).to(tl.int64)
    temperature, floor = tl.load(temperature_ptr + row), tl.load(floor_ptr + row)
    least, last = tl.load(least_ptr + row), tl.load(last_ptr + row)
    leaf_N = tl.arange(0, LEAVES)
    block_max_ptr += row * num_blocks
    block_max_N = tl.load(block_max_ptr + leaf_N, mask=leaf_N < num_blocks, other=float("-inf"))
    num = tl.sum((image(tl.div_rn(block_max_N, temperature)) >= least).to(tl.int32), axis=0)
    highest = tl.load(block_max_ptr)
    count = tl.full([], 0, tl.int32)
    for start in range(0, num, TILE // BLOCK):
        ids_T, _x_T, image_T = load_tile(
            logits_ptr + row * stride_lb, order_ptr + row * num_blocks, start, num, vocab_size, temperature, highest,
            floor, BLOCK, TILE,
        )  # fmt: skip
        inside_T = ((image_T > least) | ((image_T == least) & (ids_T <= last))).to(tl.int32)
        place_T = count + tl.cumsum(inside_T, 0) - 1
        key_T = (image_T.to(tl.int64) << 32) | (4294967295 - ids_T.to(tl.int64))
        tl.store(keys_ptr + row * num_stored + place_T, key_T, mask=(inside_T > 0) & (place_T < num_stored))
        count += tl.sum(inside_T, axis=0)


def collect_triton(
    logits_BV: Tensor, rules: Rules, support: Support, sorted_BN: Tensor, num_stored: int, num_leaves: int
) -> Tensor:
    """Returns the ids of the support, at most num_stored: int32 [B, K], most likely first, -1 after the last."""
    num_rows, vocab_size = logits_BV.shape
    keys_BK = torch.full((num_rows, num_stored), EMPTY, dtype=torch.int64, device=logits_BV.device)
    _collect_kernel[(num_rows,)](
        logits_BV, rules.temperature_B, rules.floor_B, sorted_BN, support.order_BN, support.least_B, support.last_B,
        keys_BK, vocab_size, sorted_BN.shape[1], num_stored, logits_BV.stride(0), LEAVES=num_leaves, BLOCK=BLOCK,
        TILE=TILE, num_warps=8,
    )  # fmt: skip
    keys_BK = keys_BK.sort(dim=1, descending=True).values
    ids_BK = 0xFFFFFFFF - (keys_BK & 0xFFFFFFFF)
    return ids_BK.masked_fill(keys_BK == EMPTY, -1).int()
