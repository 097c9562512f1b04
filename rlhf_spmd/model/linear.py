"""Linear layers, with faster products for the few rows of a decode step on a CPU.

- The product of weight and transposed input is up to twice as fast as F.linear (bench `generate`, bench/LOG.md): the
  libraries split the large dim among threads and vector registers instead of the small one. The result is a transposed
  view, which the next such product takes as it is.
- In half precision a product takes little longer than its launch, so matrices that read the same input are joined, and
  the residual stream has the memory layout of the results.
- In float32 MKL reorders a matrix at every product; reordering it once saves a tenth of a step.
"""

# N rows, I inputs, O outputs, D hidden, V vocabulary

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEWEST_ROWS, MOST_ROWS = 8, 64  # rows for which transposing is faster, in float32 and bfloat16, with 1 and 2 threads
FEWEST_TO_ORDER = 2**16  # weights; smaller matrices gain nothing from reordering
FEWEST_LOGITS, MOST_LOGITS = 2**17, 2**19  # logits for which it is faster including the transposition back


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, fast: bool = False) -> Tensor:
    """x [..., I] -> [..., O]; fast: allows the transposed product."""
    if fast and _is_transposed(x):
        y_NO = torch.mm(weight_OI, x.t()).t()
        return y_NO if bias_O is None else y_NO + bias_O
    return F.linear(x, weight_OI, bias_O)


def _is_transposed(x: Tensor) -> bool:
    return x.device.type == "cpu" and FEWEST_ROWS <= len(x) <= MOST_ROWS


def logits_of(x_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """-> logits_NV of decode rows, contiguous, as sampling reads them."""
    fast = FEWEST_LOGITS <= len(x_ND) * len(weight_VD) < MOST_LOGITS
    return linear(x_ND, weight_VD, fast=fast).contiguous()


def like_results(x_ND: Tensor) -> Tensor:
    """The same numbers in the memory layout of the results of `linear`, if that makes sums with them faster."""
    return x_ND.t().contiguous().t() if _is_transposed(x_ND) and x_ND.dtype.itemsize == 2 else x_ND


class Linear(nn.Linear):
    """nn.Linear, computed by `linear`."""

    def forward(self, x: Tensor, *, fast: bool = False) -> Tensor:
        return linear(x, self.weight, self.bias, fast=fast)


class Joined:
    """Stacked copies of each layer's matrices that read the same input: (weight_OI, bias_O) of q, k and v, and of gate
    and up. Drop it before the weights change."""

    def __init__(self, layers: Iterable[nn.Module]):
        self.qkv: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.gate_up: dict[int, tuple[Tensor, Tensor | None]] = {}
        for layer in layers:
            attention, mlp = layer.self_attn, layer.mlp
            self.qkv[attention.layer] = _stack(attention.q_proj, attention.k_proj, attention.v_proj)
            self.gate_up[mlp.layer] = _stack(mlp.gate_proj, mlp.up_proj)

    @classmethod
    def of(cls, model: nn.Module) -> "Joined | None":
        """For a transformer's layers in half precision on a CPU (saves 5% of a step; nothing in float32), else None."""
        weight = next(model.parameters())
        return cls(model.layers.values()) if weight.device.type == "cpu" and weight.dtype.itemsize == 2 else None


@torch.no_grad()
def in_mkl_order(model: nn.Module, num_rows: int) -> dict[nn.Module, Callable[..., Tensor]]:
    """Forwards of a transformer's linear layers for inputs [num_rows, I] in float32 on a CPU with MKL; else empty. Each
    holds a copy of the weights in MKL's order; inputs of other sizes use the layer's own. Drop them before the weights
    change. Layers whose product is summed over ranks keep their forwards."""
    weight = next(model.parameters())
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkl.is_available():
        return {}
    modules = [module for layer in model.layers.values() for module in layer.modules() if isinstance(module, nn.Linear)]
    alone = [module for module in modules if getattr(module, "group", None) is None]
    return {module: _in_mkl_order(module, num_rows) for module in alone if module.weight.numel() >= FEWEST_TO_ORDER}


def _in_mkl_order(layer: nn.Linear, num_rows: int) -> Callable[..., Tensor]:
    weight_OI, bias_O, multiply = layer.weight, layer.bias, torch.ops.mkl._mkl_linear
    ordered = torch.ops.mkl._mkl_reorder_linear_weight(weight_OI, num_rows)

    def forward(x: Tensor, *, packed: bool = False, fast: bool = False) -> Tensor:
        if fast and len(x) == num_rows:
            return multiply(x.contiguous(), ordered, weight_OI, bias_O, num_rows)
        return linear(x, weight_OI, bias_O, fast=fast)

    return forward


@torch.no_grad()
def _stack(*parts: nn.Linear) -> tuple[Tensor, Tensor | None]:
    bias_O = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    return torch.cat([part.weight for part in parts]), bias_O
