"""The norm of all blocks, with the residual added before it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf_spmd.kernels.rmsnorm import rmsnorm
from rlhf_spmd.kernels.triton_import import fused


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467); half precisions are computed in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, fast: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns norm(x); with a residual, norm(x + residual) and x + residual.

        fast: as generation computes it, without a backward pass on a CPU.
        """
        if fast or (fused(x) and x.dim() < 4):
            normed, total = rmsnorm(x, self.weight, self.eps, residual)
        else:
            total = sum_of(x, residual)
            normed = F.rms_norm(total, self.weight.shape, self.weight, self.eps)
        return normed if residual is None else (normed, total)


def normed_sum(norm: RMSNorm, x: Tensor, residual: Tensor | None, *, fast: bool) -> tuple[Tensor, Tensor]:
    """Returns norm(x + residual) and x + residual."""
    return (norm(x, fast=fast), x) if residual is None else norm(x, residual, fast=fast)


def sum_of(x: Tensor, residual: Tensor | None) -> Tensor:
    """Returns x + residual."""
    return x if residual is None else x + residual
