"""The norm of all blocks, with the residual added before it."""

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlhf_spmd.kernels.rmsnorm import rmsnorm
from rlhf_spmd.kernels.triton_import import fused
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.parallel import Group, Parallel, all_reduced, extent
from rlhf_spmd.plan.shard import Shard


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


class SlicedRMSNorm(RMSNorm):
    """RMSNorm of the slices that all tp ranks hold. Each has all weights, so their gradients are partial sums."""

    def __init__(self, size: int, eps: float, part: range, group: Group):
        """part: this rank's slice of `size`."""
        super().__init__(size, eps)
        self.part, self.group = part, group

    def forward(self, x: Tensor, residual: Tensor | None = None, *, fast: bool = False) -> Tensor:
        """Returns this rank's slice of the norm. Collective."""
        assert residual is None
        weight = self.weight[self.part.start : self.part.stop]
        return _NormOfSlices.apply(x, weight, self.eps, len(self.weight), self.group)


class _NormOfSlices(torch.autograd.Function):
    """y = x s w with s = 1 / sqrt(sum(x^2) / size + eps). With n = x s, the gradient of x is
    s (y' w - n sum(y' w n) / size). Sums are over the slices of all ranks."""

    @staticmethod
    def forward(ctx, x, weight, eps, size, group):
        ctx.size, ctx.group = size, group
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = (all_reduced(wide.square().sum(-1, keepdim=True), group) / size + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, weight, scale = ctx.saved_tensors
        normed, gradient = x * scale, gradient.to(scale.dtype)
        mean = all_reduced((gradient * weight * normed).sum(-1, keepdim=True), ctx.group) / ctx.size
        of_x = (gradient * weight - normed * mean) * scale
        return of_x.to(x.dtype), (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype), None, None, None


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


def norm_of_all_heads(what: str, config: ModelConfig, parallel: Parallel) -> Norm:
    """Makes the norm of all heads' queries or keys together, of which this rank has a slice."""
    size, part = len(extent(config, what, Shard())), extent(config, what, parallel.shard)
    if parallel.shard.tp == 1:
        return make_norm(size, config)
    return SlicedRMSNorm(size, config.rms_norm_eps, part, parallel.group)


def normed_sum(norm: Norm | None, x: Tensor, residual: Tensor | None, *, fast: bool) -> tuple[Tensor, Tensor]:
    """Returns norm(x + residual) and x + residual; without a norm the sum twice."""
    if norm is None:
        return (sum_of(x, residual),) * 2
    return (norm(x, fast=fast), x) if residual is None else norm(x, residual, fast=fast)


def sum_of(x: Tensor, residual: Tensor | None) -> Tensor:
    """Returns x + residual."""
    return x if residual is None else x + residual
