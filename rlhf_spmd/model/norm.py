"""The norm of all blocks, with the residual added before it."""

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf_spmd.kernels.rmsnorm import rmsnorm
from rlhf_spmd.kernels.triton_import import fused
from rlhf_spmd.model.config import ModelConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467); half precisions are computed in float32.

    offset: multiplies by 1 + weight, which is not rounded.
    """

    def __init__(self, size: int, eps: float, *, offset: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.offset = eps, offset

    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, fast: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns norm(x); with a residual, norm(x + residual) and x + residual.

        fast: as generation computes it, without a backward pass on a CPU.
        """
        weight = self.weight
        if self.offset:
            weight = 1.0 + weight.to(torch.promote_types(weight.dtype, torch.float32))
        if fast or (fused(x) and x.dim() < 4):
            normed, total = rmsnorm(x, weight, self.eps, residual)
        else:
            total = sum_of(x, residual)
            normed = F.rms_norm(total.to(weight.dtype), weight.shape, weight, self.eps).to(x.dtype)
        return normed if residual is None else (normed, total)


class LayerNorm(nn.LayerNorm):
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias (arXiv:1607.06450)."""

    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, fast: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes as RMSNorm does, the same with `fast`."""
        total = sum_of(x, residual)
        normed = super().forward(total)
        return normed if residual is None else (normed, total)


Norm: TypeAlias = RMSNorm | LayerNorm


def make_norm(size: int, config: ModelConfig) -> Norm:
    """Makes a norm as this model has them."""
    if config.layer_norm:
        return LayerNorm(size, config.rms_norm_eps)
    return RMSNorm(size, config.rms_norm_eps, offset=config.norm_offset)


def normed_sum(norm: Norm | None, x: Tensor, residual: Tensor | None, *, fast: bool) -> tuple[Tensor, Tensor]:
    """Returns norm(x + residual) and x + residual; without a norm the sum twice."""
    if norm is None:
        return (sum_of(x, residual),) * 2
    return (norm(x, fast=fast), x) if residual is None else norm(x, residual, fast=fast)


def sum_of(x: Tensor, residual: Tensor | None) -> Tensor:
    """Returns x + residual."""
    return x if residual is None else x + residual
