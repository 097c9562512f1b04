"""RMSNorm (arXiv:1910.07467), with the residual added before it in the same pass.

    s = x + residual          y = s / sqrt(mean(s^2) + eps) * weight

s is rounded to the dtype of x because it continues the residual stream; statistics and y are computed in float32 and
rounded once, as torch's rms_norm does. Bound by reading x and residual and writing y and s, each once. The backward
pass reads s and the gradients of y and s, and writes that of x, which is also that of the residual:

    dx = (g - h mean(g h)) / sqrt(mean(s^2) + eps) + ds        g = dy weight        h = s / sqrt(mean(s^2) + eps)
    dweight = sum of dy h over rows, of each program first

Legend: N rows, H heads (rows may be [T, H]: norms of queries and keys), D size of a row, R rows of a program at a time,
P programs of the backward pass.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_spmd.kernels import cpu
from rlhf_spmd.kernels.triton_import import DTYPES, fused, needs_gradient, tl, triton

TILE = 2048  # numbers that a program holds, if a row is shorter than that
PROGRAMS = 512  # of a backward pass at most, with a sum of dweight each; their number decides its last bits


def rmsnorm(x_ND: Tensor, weight_D: Tensor, eps: float, residual_ND: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns (y, s): the normalised rows, and x + residual (x itself without a residual). x may also be [T, H, D].

    The weight may be wider than x. There is a backward pass on GPUs alone.
    """
    has_gradient = needs_gradient(x_ND, weight_D, residual_ND)
    if fused(x_ND):
        if not has_gradient:
            return rmsnorm_triton(x_ND, weight_D, eps, residual_ND)
        y_ND, *added = _RMSNorm.apply(x_ND, weight_D, eps, residual_ND)
        return y_ND, added[0] if added else x_ND
    assert not has_gradient, "rmsnorm has no backward pass here"
    if cpu.used_for(x_ND) and weight_D.dtype == x_ND.dtype:
        return cpu.rmsnorm(x_ND, weight_D, eps, residual_ND)
    s_ND = x_ND if residual_ND is None else residual_ND + x_ND  # this order gives the memory layout of the residual
    wide_ND = s_ND.to(torch.promote_types(s_ND.dtype, torch.float32))
    scale_N1 = wide_ND.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()  # fewer operations than F.rms_norm
    return (wide_ND * scale_N1).mul_(weight_D).to(s_ND.dtype), s_ND


class _RMSNorm(torch.autograd.Function):
    """The norm by kernels. It keeps s alone."""

    @staticmethod
    def forward(ctx, x_ND, weight_D, eps, residual_ND):
        y_ND, s_ND = rmsnorm_triton(x_ND, weight_D, eps, residual_ND)
        ctx.save_for_backward(s_ND, weight_D)
        ctx.eps = eps
        ctx.set_materialize_grads(False)  # nothing may read s
        return (y_ND,) if residual_ND is None else (y_ND, s_ND)

    @staticmethod
    @once_differentiable
    def backward(ctx, y_grad_ND, s_grad_ND=None):
        (s_ND, weight_D), (_, wants_weight, _, adds) = ctx.saved_tensors, ctx.needs_input_grad
        grads = rmsnorm_backward_triton(y_grad_ND, s_grad_ND, s_ND, weight_D, ctx.eps, wants_weight=wants_weight)
        return *grads, None, grads[0] if adds else None


def rmsnorm_ref(x_ND: Tensor, weight_D: Tensor, eps: float, residual_ND: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Computes the reference: the formula, in float32 or wider."""
    s_ND = x_ND if residual_ND is None else x_ND + residual_ND
    wide_ND = s_ND.to(torch.promote_types(s_ND.dtype, torch.float32))
    y_ND = wide_ND * torch.rsqrt(wide_ND.square().mean(dim=-1, keepdim=True) + eps) * weight_D
    return y_ND.to(x_ND.dtype), s_ND


@triton.jit(do_not_specialize=["num_rows"])
def _rmsnorm_kernel(
    # pointers
    x_ptr,  # [T, H, D]
    residual_ptr,  # [T, H, D]
    weight_ptr,  # [D]
    y_ptr,  # [T, H, D], contiguous
    s_ptr,  # [T, H, D], contiguous
    # sizes
    num_rows,
    num_heads,
    size,
    eps,
    # strides
    stride_xt,
    stride_xh,
    stride_rt,
    stride_rh,
    # meta
    ADDS: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
):
    rows_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    t_R, h_R, dims_D = rows_R // num_heads, rows_R % num_heads, tl.arange(0, D)
    inside_RD = (rows_R < num_rows)[:, None] & (dims_D < size)[None, :]
    x_R = x_ptr + t_R * stride_xt + h_R * stride_xh
    s_RD = tl.load(x_R[:, None] + dims_D[None, :], mask=inside_RD, other=0.0)
    to_RD = rows_R[:, None] * size + dims_D[None, :]
    if ADDS:
        r_R = residual_ptr + t_R * stride_rt + h_R * stride_rh
        added_RD = tl.load(r_R[:, None] + dims_D[None, :], mask=inside_RD, other=0.0)
        s_RD = (s_RD.to(tl.float32) + added_RD.to(tl.float32)).to(s_ptr.dtype.element_ty)
        tl.store(s_ptr + to_RD, s_RD, mask=inside_RD)
    s_RD = s_RD.to(tl.float32)
    scale_R = tl.rsqrt(tl.sum(s_RD * s_RD, 1) / size + eps)
    weight_D = tl.load(weight_ptr + dims_D, mask=dims_D < size, other=0.0).to(tl.float32)
    y_RD = s_RD * scale_R[:, None] * weight_D[None, :]
    tl.store(y_ptr + to_RD, y_RD.to(y_ptr.dtype.element_ty), mask=inside_RD)


def rmsnorm_triton(
    x_ND: Tensor, weight_D: Tensor, eps: float, residual_ND: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Launches a program per long row, or per handful of short ones. Only the last dims must be contiguous."""
    assert x_ND.dim() in (2, 3) and weight_D.shape == x_ND.shape[-1:], x_ND.shape
    assert x_ND.stride(-1) == weight_D.stride(0) == 1
    assert residual_ND is None or (residual_ND.shape, residual_ND.dtype) == (x_ND.shape, x_ND.dtype)
    assert residual_ND is None or residual_ND.stride(-1) == 1
    assert x_ND.dtype in DTYPES, x_ND.dtype
    size, num_rows = x_ND.shape[-1], x_ND.shape[:-1].numel()
    y_ND = x_ND.new_empty(x_ND.shape)
    s_ND = x_ND if residual_ND is None else torch.empty_like(y_ND)
    if not num_rows:
        return y_ND, s_ND
    D = triton.next_power_of_2(size)
    R = max(TILE // D, 1)
    added_ND = x_ND if residual_ND is None else residual_ND
    strides = [(x.stride(0), x.stride(1) if x.dim() == 3 else 0) for x in (x_ND, added_ND)]
    _rmsnorm_kernel[(triton.cdiv(num_rows, R),)](
        *(x_ND, added_ND, weight_D, y_ND, s_ND),
        *(num_rows, x_ND.shape[1] if x_ND.dim() == 3 else 1, size, eps),
        *(*strides[0], *strides[1]),
        ADDS=residual_ND is not None,
        R=R,
        D=D,
        num_warps=4 if D <= 2048 else 8 if D <= 8192 else 16,
        enable_fp_fusion=False,
    )
    return y_ND, s_ND


@triton.jit(do_not_specialize=["num_rows"])
def _rmsnorm_backward_kernel(
    # pointers
    y_grad_ptr,  # [T, H, D], contiguous
    s_grad_ptr,  # [T, H, D], contiguous
    s_ptr,  # [T, H, D]
    weight_ptr,  # [D]
    x_grad_ptr,  # [T, H, D], contiguous
    sums_ptr,  # [P, D], contiguous
    # sizes
    num_rows,
    num_heads,
    size,
    eps,
    # strides
    stride_st,
    stride_sh,
    # meta
    ADDS: tl.constexpr,
    SUMS: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
):
    dims_D, begin = tl.arange(0, D), tl.program_id(0) * R
    weight_D = tl.load(weight_ptr + dims_D, mask=dims_D < size, other=0.0).to(tl.float32)
    sums_D = tl.zeros([D], dtype=tl.float32)
    for first in range(begin, num_rows, tl.num_programs(0) * R):
        rows_R = (first + tl.arange(0, R)).to(tl.int64)
        inside_RD = (rows_R < num_rows)[:, None] & (dims_D < size)[None, :]
        at_RD = rows_R[:, None] * size + dims_D[None, :]
        s_R = s_ptr + rows_R // num_heads * stride_st + rows_R % num_heads * stride_sh
        s_RD = tl.load(s_R[:, None] + dims_D[None, :], mask=inside_RD, other=0.0).to(tl.float32)
        y_grad_RD = tl.load(y_grad_ptr + at_RD, mask=inside_RD, other=0.0).to(tl.float32)
        scale_R = tl.rsqrt(tl.sum(s_RD * s_RD, 1) / size + eps)
        h_RD, g_RD = s_RD * scale_R[:, None], y_grad_RD * weight_D[None, :]
        x_grad_RD = (g_RD - h_RD * (tl.sum(g_RD * h_RD, 1) / size)[:, None]) * scale_R[:, None]
        if ADDS:
            x_grad_RD += tl.load(s_grad_ptr + at_RD, mask=inside_RD, other=0.0).to(tl.float32)
        tl.store(x_grad_ptr + at_RD, x_grad_RD.to(x_grad_ptr.dtype.element_ty), mask=inside_RD)
        if SUMS:
            sums_D += tl.sum(y_grad_RD * h_RD, 0)
    if SUMS:
        tl.store(sums_ptr + tl.program_id(0) * size + dims_D, sums_D, mask=dims_D < size)


def rmsnorm_backward_triton(
    y_grad_ND: Tensor, s_grad_ND: Tensor | None, s_ND: Tensor, weight_D: Tensor, eps: float, *, wants_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of x and, on request, of the weight. Launches few programs, each over many rows."""
    assert s_ND.stride(-1) == weight_D.stride(0) == 1
    size, num_rows = s_ND.shape[-1], s_ND.shape[:-1].numel()
    D = triton.next_power_of_2(size)
    R = max(TILE // D, 1)
    num_programs = min(triton.cdiv(num_rows, R), PROGRAMS)
    x_grad_ND = torch.empty(s_ND.shape, dtype=s_ND.dtype, device=s_ND.device)
    sums_PD = torch.empty(num_programs if wants_weight else 0, size, dtype=torch.float32, device=s_ND.device)
    if num_rows:
        grads = [one.contiguous() for one in (y_grad_ND, y_grad_ND if s_grad_ND is None else s_grad_ND)]
        _rmsnorm_backward_kernel[(num_programs,)](
            *(*grads, s_ND, weight_D, x_grad_ND, sums_PD),
            *(num_rows, s_ND.shape[1] if s_ND.dim() == 3 else 1, size, eps),
            *(s_ND.stride(0), s_ND.stride(1) if s_ND.dim() == 3 else 0),
            ADDS=s_grad_ND is not None,
            SUMS=wants_weight,
            R=R,
            D=D,
            num_warps=4 if D <= 2048 else 8 if D <= 4096 else 16,
            enable_fp_fusion=False,
        )
    return x_grad_ND, sums_PD.sum(0).to(weight_D.dtype) if wants_weight else None
