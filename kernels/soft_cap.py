"""Soft caps (arXiv:2408.00118): x -> cap tanh(x / cap), of logits and of attention's scores, so that none is large.

Legend: B rows, H heads, K key-value heads, t queries, T keys, d head dim, R heads of a group times queries.
"""

import math

import torch
from torch import Tensor


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Returns cap * tanh(x / cap), rounded after each step as transformers rounds; x itself without a cap."""
    return x if cap is None else (x / cap).tanh() * cap


def cap_in_place(x: Tensor, cap: float | None) -> Tensor:
    """Computes `capped`, the same bits, where x lies."""
    return x if cap is None else x.div_(cap).tanh_().mul_(cap)


def slope(capped_x: Tensor, cap: float) -> Tensor:
    """Returns the derivative of `capped` by what it gave, 0 where that was set to -inf later."""
    wide = torch.promote_types(capped_x.dtype, torch.float32)
    return (1.0 - (capped_x.to(wide) / cap).square()).clamp_(min=0.0)


def capped_attention(q_BHtd: Tensor, k_BKTd: Tensor, v_BKTd: Tensor, visible: Tensor | None, cap: float) -> Tensor:
    """Returns softmax(capped(q k^T / sqrt(d))) v -> out_BHtd; query head h reads key-value head h // (H / K).

    visible: bool, broadcasts to [B, H, t, T]; None: all. Torch's own attention has no cap, so all scores exist.
    """
    (num_rows, num_heads, num_queries, head_dim), num_kv_heads = q_BHtd.shape, k_BKTd.shape[1]
    q_BKRd = q_BHtd.reshape(num_rows, num_kv_heads, -1, head_dim)
    scores_BKRT = q_BKRd @ k_BKTd.mT / math.sqrt(head_dim)
    wide = torch.promote_types(q_BHtd.dtype, torch.float32)
    scores_BHtT = capped(scores_BKRT.to(wide), cap).view(num_rows, num_heads, num_queries, -1)
    if visible is not None:
        scores_BHtT = scores_BHtT.masked_fill(~visible, -math.inf)
    weights_BKRT = scores_BHtT.softmax(-1).to(v_BKTd.dtype).view_as(scores_BKRT)
    return (weights_BKRT @ v_BKTd).view_as(q_BHtd)
