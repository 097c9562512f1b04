"""Linear layers, and how a CPU multiplies the few rows of a decode step.

torch's product of weight and transposed input is then up to twice as fast as F.linear (bench `generate`, bench/LOG.md):
the libraries behind it split the large dim among threads and vector registers instead of the small one. The result is a
transposed view, which the next such product takes as it is. In half precision, where a product takes little longer than
starting it, matrices that read the same input are joined, and the residual stream is laid out like the results. In
float32 MKL otherwise brings a matrix into its own order at every product; done once, that saves a tenth of a step.
"""

# N rows, I inputs, O outputs, D hidden, V vocabulary

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEWEST_ROWS, MOST_ROWS = 8, 64  # between them it pays, in float32 and bfloat16, with one thread and with two
FEWEST_TO_ORDER = 2**16  # weights; smaller matrices gain nothing
FEWEST_LOGITS, MOST_LOGITS = 2**17, 2**19  # between them it pays to turn the product back, row by row


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, fast: bool = False) -> Tensor:
    """x [..., I] -> [..., O]; fast: whichever way round is faster."""
    if fast and _turns(x):
        y_NO = torch.mm(weight_OI, x.t()).t()
        return y_NO if bias_O is None else y_NO + bias_O
    return F.linear(x, weight_OI, bias_O)


def _turns(x: Tensor) -> bool:
    return x.device.type == "cpu" and FEWEST_ROWS <= len(x) <= MOST_ROWS


def logits_of(x_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """-> logits_NV of decode rows, contiguous, as sampling reads them."""
    fast = FEWEST_LOGITS <= len(x_ND) * len(weight_VD) < MOST_LOGITS
    return linear(x_ND, weight_VD, fast=fast).contiguous()


def laid_out(x_ND: Tensor) -> Tensor:
    """The same numbers, laid out as `linear` leaves its results where sums with them are then faster."""
    return x_ND.t().contiguous().t() if _turns(x_ND) and x_ND.dtype.itemsize == 2 else x_ND


class Linear(nn.Linear):
    """nn.Linear by `linear`."""

    def forward(self, x: Tensor, *, fast: bool = False) -> Tensor:
        return linear(x, self.weight, self.bias, fast=fast)


class Joined:
    """Copies of the matrices of each layer that read the same input, stacked: (weight_OI, bias_O) of queries, keys and
    values, and of gate and up. To be dropped before the weights change."""

    def __init__(self, layers: Iterable[nn.Module]):
        self.qkv: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.gate_up: dict[int, tuple[Tensor, Tensor | None]] = {}
        for layer in layers:
            attention, mlp = layer.self_attn, layer.mlp
            self.qkv[attention.layer] = _stacked(attention.q_proj, attention.k_proj, attention.v_proj)
            self.gate_up[mlp.layer] = _stacked(mlp.gate_proj, mlp.up_proj)

    @classmethod
    def of(cls, model: nn.Module) -> "Joined | None":
        """Of a transformer's layers, where that pays: in half precision on a CPU (5% of a step; nothing in float32)."""
        weight = next(model.parameters())
        return cls(model.layers.values()) if weight.device.type == "cpu" and weight.dtype.itemsize == 2 else None


@torch.no_grad()
def in_mkl_order(model: nn.Module, num_rows: int) -> dict[nn.Module, Callable[..., Tensor]]:
    """Forwards of a transformer's linear layers for inputs [num_rows, I], where that pays: in float32 on a CPU, by MKL.
    Each has a copy of its weights in MKL's order (and other inputs take the layer's own); to be dropped before the
    weights change. Layers whose product is summed over ranks keep their forwards."""
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
def _stacked(*parts: nn.Linear) -> tuple[Tensor, Tensor | None]:
    bias_O = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    return torch.cat([part.weight for part in parts]), bias_O
