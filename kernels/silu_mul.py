"""The inner step of SwiGLU (arXiv:2002.05202).

    y = silu(gate) * up        silu(x) = x / (1 + exp(-x))

silu is computed in float32 and rounded to the dtype of gate before the product, as in the torch code of training.
Bound by reading gate and up and writing y, each once. The backward pass is one kernel, too:

    dgate = dy up p (1 + gate (1 - p))        dup = dy silu(gate)        p = 1 / (1 + exp(-gate))

Legend: N rows, I inner size, J part of I that a program takes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_spmd.kernels import cpu
from rlhf_spmd.kernels.triton_import import DTYPES, fused, needs_gradient, tl, triton

TILE = 1024  # numbers of a row that a program takes


def silu_mul(gate_NI: Tensor, up_NI: Tensor | None = None) -> Tensor:
    """Returns silu(gate) * up, y_NI. Without up, the first argument is [N, 2 I]: gate and up of one projection, side by
    side.

    There is no backward pass.
    """
    gate_NI, up_NI = gate_NI.chunk(2, dim=-1) if up_NI is None else (gate_NI, up_NI)
    assert not needs_gradient(gate_NI), "silu_mul has no backward pass"
    if fused(gate_NI):
        return silu_mul_triton(gate_NI, up_NI)
    if cpu.used_for(gate_NI):
        return cpu.silu_mul(gate_NI, up_NI)
    return F.silu(gate_NI).mul_(up_NI)


def swiglu(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    """Returns y_NI as training computes it, differentiable once: on a CPU by torch's operations. It keeps gate and up
    alone."""
    return _SwiGLU.apply(gate_NI, up_NI)


class _SwiGLU(torch.autograd.Function):
    """On a CPU the bits of torch's own derivative. On a GPU both gradients lie side by side, as one product reads them
    (products.py)."""

    @staticmethod
    def forward(ctx, gate_NI, up_NI):
        ctx.save_for_backward(gate_NI, up_NI)
        ctx.fused = fused(gate_NI) and gate_NI.dim() == 2
        return silu_mul_triton(gate_NI, up_NI) if ctx.fused else F.silu(gate_NI).mul_(up_NI)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NI):
        gate_NI, up_NI = ctx.saved_tensors
        if ctx.fused:
            return swiglu_backward_triton(grad_NI.contiguous(), gate_NI, up_NI)
        return torch.ops.aten.silu_backward(grad_NI * up_NI, gate_NI), grad_NI * F.silu(gate_NI)


def silu_mul_ref(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    """Computes the reference: the formula, in float32 or wider, with one rounding before the product."""
    wide_NI = gate_NI.to(torch.promote_types(gate_NI.dtype, torch.float32))
    return (wide_NI / (1.0 + (-wide_NI).exp())).to(gate_NI.dtype) * up_NI


@triton.jit
def _silu_mul_kernel(
    # pointers
    gate_ptr,  # [N, I]
    up_ptr,  # [N, I]
    y_ptr,  # [N, I], contiguous
    # sizes
    size,
    # strides
    stride_gn,
    stride_un,
    # meta
    J: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    inner_J = tl.program_id(1) * J + tl.arange(0, J)
    inside_J = inner_J < size
    gate_J = tl.load(gate_ptr + n * stride_gn + inner_J, mask=inside_J, other=0.0).to(tl.float32)
    up_J = tl.load(up_ptr + n * stride_un + inner_J, mask=inside_J, other=0.0).to(tl.float32)
    dtype = y_ptr.dtype.element_ty
    silu_J = (gate_J / (1.0 + tl.exp(-gate_J))).to(dtype).to(tl.float32)
    tl.store(y_ptr + n * size + inner_J, (silu_J * up_J).to(dtype), mask=inside_J)


def silu_mul_triton(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    """Launches a program per TILE numbers of a row. Only the last dims must be contiguous."""
    assert gate_NI.shape == up_NI.shape and gate_NI.dim() == 2 and gate_NI.dtype == up_NI.dtype, gate_NI.shape
    assert gate_NI.stride(1) == up_NI.stride(1) == 1
    assert gate_NI.dtype in DTYPES, gate_NI.dtype
    (num_rows, size), y_NI = gate_NI.shape, torch.empty(gate_NI.shape, dtype=gate_NI.dtype, device=gate_NI.device)
    if num_rows and size:
        _silu_mul_kernel[(num_rows, triton.cdiv(size, TILE))](
            *(gate_NI, up_NI, y_NI),
            size,
            *(gate_NI.stride(0), up_NI.stride(0)),
            J=TILE,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return y_NI


@triton.jit
def _swiglu_backward_kernel(
    # pointers
    grad_ptr,  # [N, I], contiguous
    gate_ptr,  # [N, I]
    up_ptr,  # [N, I]
    both_ptr,  # [N, 2 I], contiguous
    # sizes
    size,
    # strides
    stride_gn,
    stride_un,
    # meta
    J: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    inner_J = tl.program_id(1) * J + tl.arange(0, J)
    inside_J = inner_J < size
    grad_J = tl.load(grad_ptr + n * size + inner_J, mask=inside_J, other=0.0).to(tl.float32)
    gate_J = tl.load(gate_ptr + n * stride_gn + inner_J, mask=inside_J, other=0.0).to(tl.float32)
    up_J = tl.load(up_ptr + n * stride_un + inner_J, mask=inside_J, other=0.0).to(tl.float32)
    dtype = both_ptr.dtype.element_ty
    below_J = 1.0 + tl.exp(-gate_J)
    p_J, silu_J = 1.0 / below_J, (gate_J / below_J).to(dtype).to(tl.float32)
    slope_J = (grad_J * up_J).to(dtype).to(tl.float32) * p_J * (1.0 + gate_J * (1.0 - p_J))
    to_J = both_ptr + n * 2 * size + inner_J
    tl.store(to_J, slope_J.to(dtype), mask=inside_J)
    tl.store(to_J + size, (grad_J * silu_J).to(dtype), mask=inside_J)


def swiglu_backward_triton(grad_NI: Tensor, gate_NI: Tensor, up_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of gate and up, the halves of one tensor. Programs as of `silu_mul_triton`."""
    assert grad_NI.is_contiguous() and gate_NI.stride(1) == up_NI.stride(1) == 1
    num_rows, size = gate_NI.shape
    both_N2I = torch.empty(num_rows, 2 * size, dtype=gate_NI.dtype, device=gate_NI.device)
    if num_rows and size:
        _swiglu_backward_kernel[(num_rows, triton.cdiv(size, TILE))](
            *(grad_NI, gate_NI, up_NI, both_N2I),
            size,
            *(gate_NI.stride(0), up_NI.stride(0)),
            J=TILE,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return both_N2I[:, :size], both_N2I[:, size:]
