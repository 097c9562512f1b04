"""The inner step of an MLP: an activation of the gate, times up; or without a gate one of up. Activations have Hugging
Face's names."""

# N rows, I inner size

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_spmd.kernels.silu_mul import silu_mul, swiglu
from rlhf_spmd.model.families.family import ACTIVATIONS

Gate: TypeAlias = Callable[..., Tensor]  # of gate and up, or of up alone


class _GeGLU(torch.autograd.Function):
    """gelu(gate) * up, with the tanh approximation (arXiv:2002.05202, 1606.08415). It keeps gate and up alone, as
    `swiglu` does."""

    @staticmethod
    def forward(ctx, gate_NI, up_NI):
        ctx.save_for_backward(gate_NI, up_NI)
        return F.gelu(gate_NI, approximate="tanh").mul_(up_NI)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NI):
        gate_NI, up_NI = ctx.saved_tensors
        gate_grad_NI = torch.ops.aten.gelu_backward(grad_NI * up_NI, gate_NI, approximate="tanh")
        return gate_grad_NI, grad_NI * F.gelu(gate_NI, approximate="tanh")


# activation -> the step without a backward pass, and the differentiable one
GATES: dict[str, tuple[Gate, Gate]] = {
    "silu": (silu_mul, swiglu),
    "gelu_pytorch_tanh": (_GeGLU.apply, _GeGLU.apply),
}
_TANH = partial(F.gelu, approximate="tanh")  # what all but the first two names of gelu compute
PLAIN: dict[str, Gate] = {
    **{name: _TANH for name in ACTIVATIONS if name.startswith("gelu")},
    **{"gelu": F.gelu, "gelu_python": F.gelu, "relu": F.relu, "silu": F.silu, "swish": F.silu},
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: F.silu(1.702 * x) / 1.702,  # keeps one tensor for the backward pass
}


def steps(activation: str, *, plain: bool) -> tuple[Gate, Gate]:
    """Returns both steps of an MLP. plain: without a gate."""
    return (PLAIN[activation],) * 2 if plain else GATES[activation]
