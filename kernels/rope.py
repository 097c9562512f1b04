"""Rotary positions (arXiv:2104.09864) of queries and keys in one launch.

    y_i = x_i cos_i - x_{i+f} sin_i      y_{i+f} = x_{i+f} cos_i + x_i sin_i      i < f = d / 2

in Hugging Face's order of dimensions. Every product is rounded to the dtype of x before the sum, as in the torch code
of training, so generation and training give the same bits. Bound by reading and writing q and k once. The backward
pass is the rotation by the negative angle.

Legend: T tokens, H query heads, K key-value heads, d head dim, f pairs of a head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_spmd.kernels import cpu
from rlhf_spmd.kernels.triton_import import DTYPES, fused, needs_gradient, tl, triton


def rope(q_THd: Tensor, k_TKd: Tensor, cos_Tf: Tensor, sin_Tf: Tensor) -> tuple[Tensor, Tensor]:
    """Returns q_THd and k_TKd rotated. q and k may be views of one projection. There is no backward pass on a GPU: see
    `rope_in_place`.

    cos and sin may be `prepared`, once for all layers."""
    if fused(q_THd):
        assert not needs_gradient(q_THd, k_TKd), "rope has no backward pass"
        return rope_triton(q_THd, k_TKd, cos_Tf, sin_Tf)
    if cpu.used_for(q_THd):
        return cpu.rotate(q_THd, cos_Tf, sin_Tf), cpu.rotate(k_TKd, cos_Tf, sin_Tf)
    cos_T1d, sin_T1d = doubled(cos_Tf, sin_Tf) if cos_Tf.dim() == 2 else (cos_Tf, sin_Tf)
    x_THd, pairs, num_heads = _together(q_THd, k_TKd), q_THd.shape[2] // 2, q_THd.shape[1]
    turned_THd = torch.cat((x_THd[..., pairs:], x_THd[..., :pairs]), dim=-1).mul_(sin_T1d).add_(x_THd * cos_T1d)
    return turned_THd[:, :num_heads], turned_THd[:, num_heads:]


def prepared(cos_Tf: Tensor, sin_Tf: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the factors as `rope` reads them fastest: `doubled` where torch's operations turn, else as they are."""
    return (cos_Tf, sin_Tf) if fused(cos_Tf) or cpu.used_for(cos_Tf) else doubled(cos_Tf, sin_Tf)


def rope_in_place(q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cos_Tf: Tensor, sin_Tf: Tensor) -> tuple[Tensor, ...]:
    """Rotates the first 2 f dims of q and k where they lie, by kernels, and returns q, k and v. Nothing else may read
    q and k, so that a projection of q, k and v is kept once; their gradients lie side by side, as one product reads
    them (products.py)."""
    return _Rope.apply(q_THd, k_TKd, v_TKd, cos_Tf, sin_Tf)


class _Rope(torch.autograd.Function):
    """Rotates in place; the gradients lie in one tensor."""

    @staticmethod
    def forward(ctx, q_THd, k_TKd, v_TKd, cos_Tf, sin_Tf):
        ctx.save_for_backward(cos_Tf, sin_Tf)
        both = [x_THd[..., : 2 * cos_Tf.shape[1]] for x_THd in (q_THd, k_TKd)]
        rope_triton(*both, cos_Tf, sin_Tf, out=both)
        return q_THd.detach(), k_TKd.detach(), v_TKd.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, q_grad_THd, k_grad_TKd, v_grad_TKd):
        sizes = [one.shape[1] for one in (q_grad_THd, k_grad_TKd, v_grad_TKd)]
        grads = q_grad_THd.new_empty(len(q_grad_THd), sum(sizes), q_grad_THd.shape[2]).split(sizes, dim=1)
        cos_Tf, sin_Tf = ctx.saved_tensors
        dim = 2 * cos_Tf.shape[1]
        both = [x_THd.contiguous()[..., :dim] for x_THd in (q_grad_THd, k_grad_TKd)]
        rope_triton(*both, cos_Tf, sin_Tf, out=[grad[..., :dim] for grad in grads[:2]], back=True)
        if dim < q_grad_THd.shape[2]:
            grads[0][..., dim:], grads[1][..., dim:] = q_grad_THd[..., dim:], k_grad_TKd[..., dim:]
        grads[2].copy_(v_grad_TKd)
        return *grads, None, None


def doubled(cos_Tf: Tensor, sin_Tf: Tensor) -> tuple[Tensor, Tensor]:
    """Returns factors [T, 1, d] for a whole head, and for a head with its halves exchanged. On a CPU this takes fewer,
    longer operations than half by half, and gives the same bits."""
    return torch.cat((cos_Tf, cos_Tf), dim=-1)[:, None], torch.cat((-sin_Tf, sin_Tf), dim=-1)[:, None]


def _together(q_THd: Tensor, k_TKd: Tensor) -> Tensor:
    """Returns q and k as one tensor: a view if they are adjacent in one projection."""
    num_tokens, num_heads, head_dim = q_THd.shape
    one_storage = q_THd.untyped_storage().data_ptr() == k_TKd.untyped_storage().data_ptr()
    behind = q_THd.storage_offset() + num_heads * q_THd.stride(1)
    if one_storage and k_TKd.storage_offset() == behind and k_TKd.stride() == q_THd.stride():
        return q_THd.as_strided((num_tokens, num_heads + k_TKd.shape[1], head_dim), q_THd.stride())
    return torch.cat((q_THd, k_TKd), dim=1)


def rope_ref(q_THd: Tensor, k_TKd: Tensor, cos_Tf: Tensor, sin_Tf: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the reference: q and k separately."""
    return rotate(q_THd, cos_Tf, sin_Tf), rotate(k_TKd, cos_Tf, sin_Tf)


def rotate(x_THd: Tensor, cos_Tf: Tensor, sin_Tf: Tensor) -> Tensor:
    """Rotates the pairs (x_i, x_{i + head_dim/2}) of every head by their angle (Hugging Face's order of dimensions)."""
    cos_T1f, sin_T1f = cos_Tf.unsqueeze(-2), sin_Tf.unsqueeze(-2)  # the same for every head
    a, b = x_THd.chunk(2, dim=-1)
    return torch.cat((a * cos_T1f - b * sin_T1f, b * cos_T1f + a * sin_T1f), dim=-1)


@triton.jit
def _turn(
    # pointers, of one token
    x_ptr,  # [H, 2 f]
    y_ptr,  # [H, 2 f]; may be x
    # what every head shares
    cos_1f,
    sin_1f,
    pairs_1f,
    # sizes
    num_heads,
    num_pairs,
    # strides
    stride_xh,
    stride_yh,
    # meta
    H: tl.constexpr,
):
    heads_H1 = tl.arange(0, H)[:, None]
    inside_Hf = (heads_H1 < num_heads) & (pairs_1f < num_pairs)
    at_Hf = heads_H1 * stride_xh + pairs_1f
    dtype = x_ptr.dtype.element_ty
    a_Hf = tl.load(x_ptr + at_Hf, mask=inside_Hf, other=0.0).to(tl.float32)
    b_Hf = tl.load(x_ptr + at_Hf + num_pairs, mask=inside_Hf, other=0.0).to(tl.float32)
    a_cos_Hf, b_sin_Hf = (a_Hf * cos_1f).to(dtype).to(tl.float32), (b_Hf * sin_1f).to(dtype).to(tl.float32)
    b_cos_Hf, a_sin_Hf = (b_Hf * cos_1f).to(dtype).to(tl.float32), (a_Hf * sin_1f).to(dtype).to(tl.float32)
    tl.debug_barrier()  # y may be x: a warp that also holds these numbers must have read them
    to_Hf = heads_H1 * stride_yh + pairs_1f
    tl.store(y_ptr + to_Hf, (a_cos_Hf - b_sin_Hf).to(dtype), mask=inside_Hf)
    tl.store(y_ptr + to_Hf + num_pairs, (b_cos_Hf + a_sin_Hf).to(dtype), mask=inside_Hf)


@triton.jit
def _rope_kernel(
    # pointers
    q_ptr,  # [T, H, 2 f]
    k_ptr,  # [T, K, 2 f]
    cos_ptr,  # [T, f]
    sin_ptr,  # [T, f]
    turned_q_ptr,  # [T, H, 2 f]
    turned_k_ptr,  # [T, K, 2 f]
    # sizes
    num_heads,
    num_kv_heads,
    num_pairs,
    # strides
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kk,
    stride_turned_qt,
    stride_turned_qh,
    stride_turned_kt,
    stride_turned_kk,
    stride_ct,
    stride_st,
    # meta
    BACK: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    pairs_1f = tl.arange(0, F)[None, :]
    cos_1f = tl.load(cos_ptr + t * stride_ct + pairs_1f, mask=pairs_1f < num_pairs, other=0.0).to(tl.float32)
    sin_1f = tl.load(sin_ptr + t * stride_st + pairs_1f, mask=pairs_1f < num_pairs, other=0.0).to(tl.float32)
    if BACK:
        sin_1f = -sin_1f
    from_q, to_q = q_ptr + t * stride_qt, turned_q_ptr + t * stride_turned_qt
    from_k, to_k = k_ptr + t * stride_kt, turned_k_ptr + t * stride_turned_kt
    _turn(from_q, to_q, cos_1f, sin_1f, pairs_1f, num_heads, num_pairs, stride_qh, stride_turned_qh, H)
    _turn(from_k, to_k, cos_1f, sin_1f, pairs_1f, num_kv_heads, num_pairs, stride_kk, stride_turned_kk, K)


def rope_triton(
    q_THd: Tensor,
    k_TKd: Tensor,
    cos_Tf: Tensor,
    sin_Tf: Tensor,
    *,
    out: Sequence[Tensor] | None = None,
    back: bool = False,
) -> tuple[Tensor, Tensor]:
    """Launches a program per token. Only the last dims must be contiguous; cos and sin have the dtype of q.

    out: where the rotated q and k go; may be q and k.
    back: rotate by the negative angle.
    """
    (num_tokens, num_heads, head_dim), (_, num_kv_heads, _) = q_THd.shape, k_TKd.shape
    assert head_dim % 2 == 0 and k_TKd.shape == (num_tokens, num_kv_heads, head_dim), (q_THd.shape, k_TKd.shape)
    assert cos_Tf.shape == sin_Tf.shape == (num_tokens, head_dim // 2), cos_Tf.shape
    assert q_THd.dtype == k_TKd.dtype == cos_Tf.dtype == sin_Tf.dtype
    assert q_THd.dtype in DTYPES, q_THd.dtype
    assert q_THd.stride(2) == k_TKd.stride(2) == cos_Tf.stride(1) == sin_Tf.stride(1) == 1
    q_out, k_out = out or (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THd, k_TKd))
    if num_tokens:
        _rope_kernel[(num_tokens,)](
            *(q_THd, k_TKd, cos_Tf, sin_Tf, q_out, k_out),
            *(num_heads, num_kv_heads, head_dim // 2),
            *(stride for x in (q_THd, k_TKd, q_out, k_out) for stride in x.stride()[:2]),
            *(cos_Tf.stride(0), sin_Tf.stride(0)),
            BACK=back,
            H=triton.next_power_of_2(num_heads),
            K=triton.next_power_of_2(num_kv_heads),
            F=triton.next_power_of_2(head_dim // 2),
            num_warps=4,
            enable_fp_fusion=False,  # a fused multiply-add skips the rounding that torch does
        )
    return q_out, k_out
