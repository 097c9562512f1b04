"""Attention of one new token per row over a paged KV cache (arXiv:2309.06180).

    out_bh = sum_t softmax_t(q_bh . k_bt / sqrt(d)) v_bt      over the last `window` of the row's lengths_b tokens

A cap, if there is one, bounds what the softmax reads (soft_cap.py).

Token t of row b lies in block tables_bm[t // s], slot t % s, of a cache of n blocks of s slots. Query head h reads
key-value head h // (H / K). Lengths include the new token, whose keys and values are already in the cache. A row of
length 0 (padding in a CUDA graph's batch) gives zeros. Table entries beyond a row's length may hold anything.

The kernel is bound by reading keys and values once. A small batch would leave most of a GPU idle, so a row's tokens are
split among programs (flash decoding, arXiv:2311.01282). Each program writes its part of the output and the log of its
sum of exponentials; a second kernel merges them. The number of splits depends on shapes only, never on lengths, so a
CUDA graph can capture the launch. The query heads of one key-value head form the rows of a matrix product.

On a CPU torch's attention runs with a mask that is made once per step for all layers (`Decode.prepare`).

Legend: B rows, H heads, K key-value heads, G heads of a group padded to 16, n blocks, s slots of a block, M blocks of a
row's table, S slots in use, d head dim, D that dim padded to a power of two, P parts of a split row.
"""

import functools
import math
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_spmd.kernels import cpu
from rlhf_spmd.kernels.soft_cap import capped, capped_attention
from rlhf_spmd.kernels.triton_import import tl, triton

MIN_TOKENS = 64  # a program takes at least this many tokens, if the row has them
MAX_TOKENS = 2048  # a program is planned to take at most this many: one long row must not delay a batch of short ones
MAX_SPLITS = 64
PROGRAMS_PER_PROCESSOR = 4  # enough loads in flight to fill the memory bus
TILE_BYTES = 16384  # of keys (and of values) that a program loads at once
TOGETHER_TOKENS = 256  # longest rows whose grouped queries a CPU processes together in half precision
WITHOUT = 2**31 - 1  # the window of full attention
LOG2_E = tl.constexpr(math.log2(math.e))


@dataclass(slots=True)
class Decode:
    """What the rows of one decode step attend to: made once per step, used by every layer.

    On a GPU it only holds the two tensors and reads nothing back, so it can be used in a CUDA graph. On a CPU it also
    holds the mask and the positions of the blocks, which all layers share.
    """

    tables_BM: Tensor  # int32
    lengths_B: Tensor  # int32 or int64
    block_size: int
    dtype: torch.dtype
    num_slots: int  # the longest row on a CPU, the longest possible one on a GPU
    in_place: bool = False  # row b has one block, block b: the cache itself is the batch
    used_BM: Tensor | None = None  # CPU: the table up to the longest row, 0 beyond each row's length
    empty_B: Tensor | None = None  # CPU: rows of length 0, if any
    _masks: dict = field(default_factory=dict)  # window -> mask_B11S
    _places: dict = field(default_factory=dict)  # K -> index of (row, kv head, block) in the cache

    @classmethod
    def prepare(cls, tables_BM: Tensor, lengths_B: Tensor, block_size: int, dtype: torch.dtype) -> "Decode":
        """Prepares what all layers of a step have in common.

        tables_BM: int32, on the cache's device.
        lengths_B: int32 or int64, on the cache's device.
        dtype: of the queries.
        """
        assert tables_BM.shape[0] == lengths_B.shape[0] and tables_BM.device == lengths_B.device
        if tables_BM.is_cuda:
            return cls(tables_BM, lengths_B, block_size, dtype, tables_BM.shape[1] * block_size)
        tables, lengths = tables_BM.numpy(), lengths_B.numpy()  # small operations cost a third of torch's
        longest = max(int(lengths.max(initial=0)), 1)
        assert longest <= tables.shape[1] * block_size, "a row is longer than its table"
        num_blocks = -(-longest // block_size)
        starts_M = np.arange(num_blocks) * block_size
        used = np.where(starts_M < lengths[:, None], tables[:, :num_blocks], 0).astype(np.int64)
        empty = lengths == 0
        in_place = num_blocks == 1 and bool(((tables[:, 0] == np.arange(len(lengths))) | empty).all())
        step = cls(tables_BM, lengths_B, block_size, dtype, longest if in_place else num_blocks * block_size)
        step.in_place, step.used_BM = in_place, torch.from_numpy(used)
        step.empty_B = torch.from_numpy(empty) if empty.any() else None
        return step

    def mask(self, window: int | None) -> Tensor | None:
        """Returns mask_B11S to add to scores on a CPU, 0 or -inf; None: every row sees every slot. Shared by all
        layers."""
        if window is not None and window >= self.num_slots:
            window = None
        if window not in self._masks:
            slots_S, lengths_B1 = np.arange(self.num_slots), self.lengths_B.numpy()[:, None]
            hidden_BS = slots_S >= lengths_B1
            if window is not None:
                hidden_BS |= slots_S < lengths_B1 - window
            hidden_BS &= lengths_B1 > 0  # a softmax over no slot would be NaN; the output of these rows is zeroed
            if hidden_BS.any():
                mask_BS = torch.zeros(hidden_BS.shape, dtype=self.dtype)
                mask_BS.masked_fill_(torch.from_numpy(hidden_BS), -torch.inf)
                self._masks[window] = mask_BS[:, None, None]
            else:
                self._masks[window] = None
        return self._masks[window]

    def gather(self, cache_nKsd: Tensor) -> Tensor:
        """Returns cache_BKSd on a CPU, the slots in use of every row: a view if the blocks are in order, else a
        copy."""
        num_blocks, num_kv_heads, block_size, head_dim = cache_nKsd.shape
        if self.in_place:
            return cache_nKsd[: len(self.lengths_B), :, : self.num_slots]
        assert self.used_BM is not None, "of a CPU"
        if num_kv_heads not in self._places:
            places_BKM = self.used_BM[:, None] * num_kv_heads + torch.arange(num_kv_heads)[:, None]
            self._places[num_kv_heads] = places_BKM.flatten()
        blocks = cache_nKsd.view(num_blocks * num_kv_heads, block_size, head_dim)
        picked = blocks.index_select(0, self._places[num_kv_heads])
        return picked.view(len(self.lengths_B), num_kv_heads, self.num_slots, head_dim)


def decode_attention(
    q_BHd: Tensor,
    keys_nKsd: Tensor,
    values_nKsd: Tensor,
    step: Decode,
    *,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Computes attention of one token of each row: out_BHd, in the queries' dtype.

    window: number of a row's last tokens that are visible; None: all.
    cap: of scores; None: none.

    On a CPU the cache must be finite everywhere (initialise it with zeros), because a hidden slot has weight 0, and 0 x
    NaN is NaN. There is no backward pass.
    """
    assert not (torch.is_grad_enabled() and q_BHd.requires_grad), "decode_attention has no backward pass"
    assert keys_nKsd.shape[2] == step.block_size, (keys_nKsd.shape, step.block_size)
    if q_BHd.is_cuda:
        rows = step.tables_BM, step.lengths_B
        return decode_attention_triton(q_BHd, keys_nKsd, values_nKsd, *rows, window=window, cap=cap)
    if cap is None and cpu.used_for(q_BHd) and q_BHd.shape[2] % cpu.LANES == 0:
        return cpu.decode_attention(q_BHd, keys_nKsd, values_nKsd, step.tables_BM, step.lengths_B, window)
    return _on_cpu(q_BHd, step.gather(keys_nKsd), step.gather(values_nKsd), step.mask(window), step.empty_B, cap)


def _on_cpu(
    q_BHd: Tensor,
    k_BKSd: Tensor,
    v_BKSd: Tensor,
    mask_B11S: Tensor | None,
    empty_B: Tensor | None,
    cap: float | None,
) -> Tensor:
    """Calls torch's attention without repeating keys and values: the heads of a group are queries of one key-value
    head.

    The exception is half precision with one thread or long rows: there torch packs keys for several queries, which
    costs more than it saves (a third at 32 rows and 8/4 heads of 64).
    """
    num_rows, num_heads, head_dim = q_BHd.shape
    num_kv_heads = k_BKSd.shape[1]
    together = q_BHd.dtype.itemsize > 2 or (torch.get_num_threads() > 1 and k_BKSd.shape[2] <= TOGETHER_TOKENS)
    q = q_BHd.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim) if together else q_BHd[:, :, None]
    if cap is None:
        out = F.scaled_dot_product_attention(q, k_BKSd, v_BKSd, attn_mask=mask_B11S, enable_gqa=not together)
    else:
        out = capped_attention(q_BHd[:, :, None], k_BKSd, v_BKSd, None if mask_B11S is None else mask_B11S == 0, cap)
    out_BHd = out.reshape(num_rows, num_heads, head_dim)
    return out_BHd if empty_B is None else out_BHd.masked_fill(empty_B[:, None, None], 0.0)


def decode_attention_ref(
    q_BHd: Tensor,
    keys_nKsd: Tensor,
    values_nKsd: Tensor,
    tables_BM: Tensor,
    lengths_B: Tensor,
    *,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Computes the reference: row by row, token by token, in float32 or wider."""
    wide = torch.promote_types(q_BHd.dtype, torch.float32)
    block_size, group = keys_nKsd.shape[2], q_BHd.shape[1] // keys_nKsd.shape[1]
    out_BHd = torch.zeros_like(q_BHd)
    for b, length in enumerate(lengths_B.tolist()):
        if not length:
            continue
        tokens = range(0 if window is None else max(length - window, 0), length)
        places = [(int(tables_BM[b, t // block_size]), t % block_size) for t in tokens]
        k_KSd, v_KSd = (
            torch.stack([cache[block, :, slot] for block, slot in places], dim=1).to(wide)
            for cache in (keys_nKsd, values_nKsd)
        )
        scores_HS = torch.einsum("hd,hsd->hs", q_BHd[b].to(wide), k_KSd.repeat_interleave(group, 0))
        weights_HS = capped(scores_HS / math.sqrt(q_BHd.shape[2]), cap).softmax(dim=1)
        out_BHd[b] = torch.einsum("hs,hsd->hd", weights_HS, v_KSd.repeat_interleave(group, 0)).to(q_BHd.dtype)
    return out_BHd


@triton.jit
def _scan(
    # pointers, of one row and key-value head
    keys_ptr,  # [n, s, d]
    values_ptr,  # [n, s, d]
    table_ptr,  # [M]
    # the queries, and the range of tokens that they see
    q_GD,
    start,
    end,
    # sizes
    head_dim,
    scale,
    # strides
    stride_kn,
    stride_ks,
    stride_vn,
    stride_vs,
    # meta
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    CAP: tl.constexpr,
):
    """Returns the sum of exponentials times values, the maximal exponent (base 2), and the sum of exponentials; in one
    pass."""
    dims_D = tl.arange(0, D)
    max_G = tl.full([G], -float("inf"), tl.float32)
    sum_G = tl.zeros([G], tl.float32)
    out_GD = tl.zeros([G, D], tl.float32)
    if WIDE:
        q_GD = q_GD.to(tl.float32)
    for at in range(start, end, TILE):
        tokens_S = at + tl.arange(0, TILE)
        real_S = tokens_S < end
        blocks_S = tl.load(table_ptr + tokens_S // BLOCK_SIZE, mask=real_S, other=0).to(tl.int64)
        slots_S = tokens_S % BLOCK_SIZE
        inside_SD = real_S[:, None] & (dims_D < head_dim)[None, :]
        k_S = keys_ptr + blocks_S * stride_kn + slots_S * stride_ks
        k_SD = tl.load(k_S[:, None] + dims_D[None, :], mask=inside_SD, other=0.0)
        if WIDE:
            k_SD = k_SD.to(tl.float32)
        scores_GS = tl.dot(q_GD, tl.trans(k_SD), input_precision="ieee") * scale
        if CAP > 0:  # of scores of base 2; with tanh(x) = 1 - 2 / (exp(2 x) + 1)
            scores_GS = CAP * (1.0 - 2.0 / (tl.exp2(scores_GS * (2.0 * LOG2_E / CAP)) + 1.0))
        scores_GS = tl.where(real_S[None, :], scores_GS, -float("inf"))
        # Every tile holds a real token, so the maximum is finite.
        new_max_G = tl.maximum(max_G, tl.max(scores_GS, 1))
        old_G = tl.exp2(max_G - new_max_G)
        weights_GS = tl.exp2(scores_GS - new_max_G[:, None])
        v_S = values_ptr + blocks_S * stride_vn + slots_S * stride_vs
        v_SD = tl.load(v_S[:, None] + dims_D[None, :], mask=inside_SD, other=0.0)
        sum_G = sum_G * old_G + tl.sum(weights_GS, 1)
        weights_GS = weights_GS.to(v_SD.dtype)
        if WIDE:
            weights_GS, v_SD = weights_GS.to(tl.float32), v_SD.to(tl.float32)
        out_GD = out_GD * old_G[:, None] + tl.dot(weights_GS, v_SD, input_precision="ieee")
        max_G = new_max_G
    return out_GD, max_G, sum_G


@triton.jit(do_not_specialize=["stride_tb"])
def _split_kernel(
    # pointers
    q_ptr,  # [B, H, d]
    keys_ptr,  # [n, K, s, d]
    values_ptr,  # [n, K, s, d]
    tables_ptr,  # [B, M]
    lengths_ptr,  # [B]
    out_ptr,  # [B, H, d] if there is one part, else the parts [B, H, P, d] float32
    logs_ptr,  # [B, H, P] float32: log2 of each part's sum of exponentials
    # sizes
    group,
    head_dim,
    window,
    scale,  # log2(e) / sqrt(d): exponentials are of base 2
    # strides
    stride_qb,
    stride_qh,
    stride_kn,
    stride_kk,
    stride_ks,
    stride_vn,
    stride_vk,
    stride_vs,
    stride_tb,
    # meta
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MIN: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    CAP: tl.constexpr,
):
    b, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = group * tl.num_programs(1)
    length = tl.load(lengths_ptr + b).to(tl.int32)
    first = tl.maximum(length - window, 0)
    share = tl.cdiv(tl.cdiv(length - first, P), TILE) * TILE
    share = tl.maximum(share, MIN)  # parts beyond the row's tokens stay empty
    start = first + part * share
    end = tl.minimum(start + share, length)

    heads_G, dims_D = tl.arange(0, G), tl.arange(0, D)
    inside_GD = (heads_G < group)[:, None] & (dims_D < head_dim)[None, :]
    q_row_ptr = q_ptr + b.to(tl.int64) * stride_qb + kv_head * group * stride_qh
    q_GD = tl.load(q_row_ptr + heads_G[:, None] * stride_qh + dims_D[None, :], mask=inside_GD, other=0.0)
    of_keys, of_values = keys_ptr + kv_head * stride_kk, values_ptr + kv_head * stride_vk
    of_row = tables_ptr + b.to(tl.int64) * stride_tb
    out_GD, max_G, sum_G = _scan(
        of_keys, of_values, of_row, q_GD, start, end, head_dim, scale, stride_kn, stride_ks, stride_vn, stride_vs,
        BLOCK_SIZE, TILE, G, D, WIDE, CAP,
    )  # fmt: skip
    sum_G = tl.where(sum_G > 0, sum_G, 1.0)
    out_GD = out_GD / sum_G[:, None]  # zeros where there is no token
    row_G = (b * num_heads + kv_head * group + heads_G).to(tl.int64) * P + part
    if P > 1:  # an empty part is not read
        inside_GD = (heads_G < tl.where(start < end, group, 0))[:, None] & (dims_D < head_dim)[None, :]
        tl.store(logs_ptr + row_G, max_G + tl.log2(sum_G), mask=heads_G < group)  # -inf for an empty part
    out_ptrs_GD = out_ptr + row_G[:, None] * head_dim + dims_D[None, :]
    tl.store(out_ptrs_GD, out_GD.to(out_ptr.dtype.element_ty), mask=inside_GD)


@triton.jit
def _merge_kernel(
    # pointers
    parts_ptr,  # [B * H, P, d] float32
    logs_ptr,  # [B * H, P] float32
    out_ptr,  # [B * H, d]
    # sizes
    head_dim,
    # meta
    P: tl.constexpr,
    D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    parts_P, dims_D = tl.arange(0, P), tl.arange(0, D)
    logs_P = tl.load(logs_ptr + row * P + parts_P)
    highest = tl.max(logs_P, 0)
    empty_P = logs_P == -float("inf")
    weights_P = tl.where(empty_P, 0.0, tl.exp2(logs_P - tl.where(highest == -float("inf"), 0.0, highest)))
    # An empty part was never written, so it is not read.
    inside_PD = (logs_P > -float("inf"))[:, None] & (dims_D < head_dim)[None, :]
    at_PD = (row * P + parts_P)[:, None] * head_dim + dims_D[None, :]
    parts_PD = tl.load(parts_ptr + at_PD, mask=inside_PD, other=0.0)
    total = tl.sum(weights_P, 0)
    out_D = tl.sum(parts_PD * weights_P[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * head_dim + dims_D, out_D.to(out_ptr.dtype.element_ty), mask=dims_D < head_dim)


def decode_attention_triton(
    q_BHd: Tensor,
    keys_nKsd: Tensor,
    values_nKsd: Tensor,
    tables_BM: Tensor,
    lengths_B: Tensor,
    *,
    window: int | None = None,
    cap: float | None = None,
    num_parts: int | None = None,
) -> Tensor:
    """Launches the kernels. Only the last dim of q and of the cache must be contiguous.

    num_parts: a power of two; None: chosen from the shapes.
    """
    (num_rows, num_heads, head_dim), (_, num_kv_heads, block_size, _) = q_BHd.shape, keys_nKsd.shape
    assert keys_nKsd.shape == values_nKsd.shape and keys_nKsd.shape[3] == head_dim, (q_BHd.shape, keys_nKsd.shape)
    assert q_BHd.dtype == keys_nKsd.dtype == values_nKsd.dtype, "queries and cache have one dtype"
    assert q_BHd.dtype in (torch.float32, torch.bfloat16, torch.float16), q_BHd.dtype
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    assert q_BHd.stride(2) == keys_nKsd.stride(3) == values_nKsd.stride(3) == tables_BM.stride(1) == 1
    assert tables_BM.shape[0] == lengths_B.shape[0] == num_rows and lengths_B.is_contiguous()
    assert window is None or window > 0, window
    out_BHd = torch.empty(q_BHd.shape, dtype=q_BHd.dtype, device=q_BHd.device)
    if not num_rows:
        return out_BHd
    D = max(triton.next_power_of_2(head_dim), 16)
    group = num_heads // num_kv_heads
    if num_parts is None:
        longest = tables_BM.shape[1] * block_size if window is None else min(window, tables_BM.shape[1] * block_size)
        num_parts = choose_parts(num_rows * num_kv_heads, longest, processors(q_BHd.device))
    assert triton.next_power_of_2(num_parts) == num_parts <= MAX_SPLITS, num_parts
    parts_BHPd, logs_BHP = out_BHd, out_BHd  # not used where one part is the whole
    if num_parts > 1:
        parts_BHPd = q_BHd.new_empty((num_rows, num_heads, num_parts, head_dim), dtype=torch.float32)
        logs_BHP = q_BHd.new_empty((num_rows, num_heads, num_parts), dtype=torch.float32)
    _split_kernel[(num_rows, num_kv_heads, num_parts)](
        *(q_BHd, keys_nKsd, values_nKsd, tables_BM, lengths_B, parts_BHPd, logs_BHP),
        *(group, head_dim, WITHOUT if window is None else window, math.log2(math.e) / math.sqrt(head_dim)),
        *(*q_BHd.stride()[:2], *keys_nKsd.stride()[:3], *values_nKsd.stride()[:3], tables_BM.stride(0)),
        BLOCK_SIZE=block_size,
        TILE=max(16, min(128, TILE_BYTES // (D * q_BHd.element_size()))),
        MIN=MIN_TOKENS,
        P=num_parts,
        G=max(16, triton.next_power_of_2(group)),
        D=D,
        WIDE=not isinstance(_split_kernel, triton.JITFunction),  # the interpreter has no bfloat16 products
        CAP=0.0 if cap is None else cap * math.log2(math.e),
        num_warps=8 if q_BHd.dtype == torch.float32 else 4,  # its products take no tensor cores, and 4 would spill
        num_stages=3,
        enable_fp_fusion=False,
    )
    if num_parts > 1:
        _merge_kernel[(num_rows * num_heads,)](
            parts_BHPd, logs_BHP, out_BHd, head_dim, P=num_parts, D=D, num_warps=4, enable_fp_fusion=False
        )
    return out_BHd


def choose_parts(num_pairs: int, longest: int, num_processors: int) -> int:
    """Returns the parts that a row is split into, a power of two: about enough programs to fill the device, with
    MIN_TOKENS to MAX_TOKENS each.

    num_pairs: (row, key-value head) pairs.
    longest: tokens that a row can have.

    The number that fills the device is rounded to the nearest power of two, not up: parts cost bytes, which the second
    kernel reads again, and a full device gains nothing from twice as many programs.
    """
    exactly = num_processors * PROGRAMS_PER_PROCESSOR / num_pairs
    to_fill = 1 << max(round(math.log2(exactly)), 0)
    wanted = max(min(to_fill, longest // MIN_TOKENS), -(-longest // MAX_TOKENS), 1)
    return min(1 << (wanted - 1).bit_length(), MAX_SPLITS)


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
