"""Writes new keys and values into a paged KV cache.

    cache_n[slot // s, k, slot % s] = new_t[k]       slot = slots_t = block * s + offset; -1: not written

The slots of one call are distinct (except -1), so the order of writing does not matter. Bound by writing 2 T K d
numbers.

Legend: T new tokens, K key-value heads, d head dim, n blocks, s slots of a block.
"""

import torch
from torch import Tensor

from rlhf_spmd.kernels import cpu
from rlhf_spmd.kernels.triton_import import tl, triton


def heads_of(slots_T: Tensor, cache_nKsd: Tensor) -> Tensor | None:
    """Returns the row of each token's heads in a contiguous cache viewed as [n * K * s, d]: int64 [T * K], computed
    once for all layers; no slot may be -1. None if `kv_write` needs no such rows for this cache."""
    if cache_nKsd.is_cuda or cpu.used_for(cache_nKsd):
        return None
    num_heads, block_size = cache_nKsd.shape[1:3]
    blocks_T = slots_T.div(block_size, rounding_mode="floor")
    first_T = blocks_T * (num_heads * block_size) + slots_T.remainder(block_size)
    return (first_T[:, None] + torch.arange(num_heads) * block_size).flatten()


@torch.no_grad()
def kv_write(
    keys_TKd: Tensor,
    values_TKd: Tensor,
    cache_keys_nKsd: Tensor,
    cache_values_nKsd: Tensor,
    slots_T: Tensor,
    heads_TK: Tensor | None = None,
) -> None:
    """Writes keys and values of new tokens to the cache.

    slots_T: int64, the slot of each token; -1: not written (padding).
    heads_TK: `heads_of` the slots.
    """
    if keys_TKd.is_cuda:
        kv_write_triton(keys_TKd, values_TKd, cache_keys_nKsd, cache_values_nKsd, slots_T)
        return
    if cpu.used_for(keys_TKd):
        cpu.kv_write(keys_TKd, cache_keys_nKsd, slots_T)
        cpu.kv_write(values_TKd, cache_values_nKsd, slots_T)
        return
    if heads_TK is not None:
        for new_TKd, cache_nKsd in ((keys_TKd, cache_keys_nKsd), (values_TKd, cache_values_nKsd)):
            head_dim = new_TKd.shape[2]
            cache_nKsd.view(-1, head_dim).index_copy_(0, heads_TK, new_TKd.reshape(-1, head_dim))
        return
    slots = slots_T.numpy()  # small operations cost a third of torch's
    if len(slots) and slots.min() < 0:
        real_T = slots_T >= 0
        keys_TKd, values_TKd, slots = keys_TKd[real_T], values_TKd[real_T], slots[slots >= 0]
    index = tuple(map(torch.from_numpy, divmod(slots, cache_keys_nKsd.shape[2])))
    cache_keys_nKsd.transpose(1, 2).index_put_(index, keys_TKd)
    cache_values_nKsd.transpose(1, 2).index_put_(index, values_TKd)


def kv_write_ref(
    keys_TKd: Tensor, values_TKd: Tensor, cache_keys_nKsd: Tensor, cache_values_nKsd: Tensor, slots_T: Tensor
) -> None:
    """Writes token by token, as the reference."""
    block_size = cache_keys_nKsd.shape[2]
    for t, slot in enumerate(slots_T.tolist()):
        if slot >= 0:
            cache_keys_nKsd[slot // block_size, :, slot % block_size] = keys_TKd[t]
            cache_values_nKsd[slot // block_size, :, slot % block_size] = values_TKd[t]


@triton.jit
def _kv_write_kernel(
    # pointers
    keys_ptr,  # [T, K, d]
    values_ptr,  # [T, K, d]
    cache_keys_ptr,  # [n, K, s, d]
    cache_values_ptr,  # [n, K, s, d]
    slots_ptr,  # [T]
    # sizes
    num_heads,
    head_dim,
    # strides
    stride_kt,
    stride_kk,
    stride_vt,
    stride_vk,
    stride_ckn,
    stride_ckk,
    stride_cks,
    stride_cvn,
    stride_cvk,
    stride_cvs,
    # meta
    BLOCK_SIZE: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    heads_K1, dims_1D = tl.arange(0, K)[:, None], tl.arange(0, D)[None, :]
    inside_KD = (heads_K1 < tl.where(slot >= 0, num_heads, 0)) & (dims_1D < head_dim)
    keys_KD = tl.load(keys_ptr + t * stride_kt + heads_K1 * stride_kk + dims_1D, mask=inside_KD)
    values_KD = tl.load(values_ptr + t * stride_vt + heads_K1 * stride_vk + dims_1D, mask=inside_KD)
    to_keys = cache_keys_ptr + block * stride_ckn + offset * stride_cks
    to_values = cache_values_ptr + block * stride_cvn + offset * stride_cvs
    tl.store(to_keys + heads_K1 * stride_ckk + dims_1D, keys_KD, mask=inside_KD)
    tl.store(to_values + heads_K1 * stride_cvk + dims_1D, values_KD, mask=inside_KD)


def kv_write_triton(
    keys_TKd: Tensor, values_TKd: Tensor, cache_keys_nKsd: Tensor, cache_values_nKsd: Tensor, slots_T: Tensor
) -> None:
    """Launches a program per token. Last dims must be contiguous."""
    num_tokens, num_heads, head_dim = keys_TKd.shape
    block_size = cache_keys_nKsd.shape[2]
    assert keys_TKd.shape == values_TKd.shape and slots_T.shape == (num_tokens,)
    assert cache_keys_nKsd.shape == cache_values_nKsd.shape
    assert cache_keys_nKsd.shape[1] == num_heads and cache_keys_nKsd.shape[3] == head_dim, cache_keys_nKsd.shape
    assert keys_TKd.stride(2) == values_TKd.stride(2) == 1 and slots_T.is_contiguous() and slots_T.dtype == torch.int64
    assert cache_keys_nKsd.stride(3) == cache_values_nKsd.stride(3) == 1
    if not num_tokens:
        return
    _kv_write_kernel[(num_tokens,)](
        *(keys_TKd, values_TKd, cache_keys_nKsd, cache_values_nKsd, slots_T),
        *(num_heads, head_dim),
        *(*keys_TKd.stride()[:2], *values_TKd.stride()[:2]),
        *(*cache_keys_nKsd.stride()[:3], *cache_values_nKsd.stride()[:3]),
        BLOCK_SIZE=block_size,
        K=triton.next_power_of_2(num_heads),
        D=triton.next_power_of_2(head_dim),
        num_warps=4,
        enable_fp_fusion=False,
    )
