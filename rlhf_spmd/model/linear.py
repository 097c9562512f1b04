"""Linear layers, and the copies of their weights that generation multiplies with."""

# N rows, D hidden, I inputs, O outputs, R rank of adapters, V vocabulary

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlhf_spmd.kernels.products import Packed, earns_packing, packed, product
from rlhf_spmd.plan.adapters import Adapters

Weight: TypeAlias = Tensor | Packed
Copy = Callable[[Tensor], Weight]  # a stacked weight -> itself, or its packed copy


class Linear(nn.Linear):
    """nn.Linear, computed by `product`."""

    def forward(self, x: Tensor, *, weight: Packed | None = None) -> Tensor:
        """weight: a copy to use in the weight's place."""
        return product(x, self.weight if weight is None else weight, self.bias)


class Adapted(nn.Module):
    """A linear layer with an adapter (plan/adapters.py), whose factors are never merged into the weight: training,
    inference and generation compute the same, so they agree, and the weight stays as it is."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def adapt(self, adapters: Adapters, dtype: torch.dtype) -> None:
        """Makes the factors, without values."""
        num_out, num_in = self.weight.shape
        self.scale = adapters.scale
        self.lora_A = nn.Parameter(torch.empty(adapters.rank, num_in, dtype=dtype))
        self.lora_B = nn.Parameter(torch.empty(num_out, adapters.rank, dtype=dtype))

    def with_adapter(self, x: Tensor, y: Tensor) -> Tensor:
        """y + s B (A x), rounded once to the precision of y. y: the product with the weight."""
        return (y + _LowRank.apply(x, self.lora_A, self.lora_B, self.scale)).to(y.dtype)


class AdaptedLinear(Linear, Adapted):
    """A `Linear` with an adapter."""

    def forward(self, x: Tensor, *, weight: Packed | None = None) -> Tensor:
        """See `Linear`."""
        return self.with_adapter(x, super().forward(x, weight=weight))


class _LowRank(torch.autograd.Function):
    """s B (A x) in the precision of the factors. It keeps x as it is, without a copy in that precision."""

    @staticmethod
    def forward(ctx, x, A_RI, B_OR, scale):
        inner = product(x.to(A_RI.dtype), A_RI) * scale
        ctx.save_for_backward(x, A_RI, B_OR, inner)
        ctx.scale = scale
        return product(inner, B_OR)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x, A_RI, B_OR, inner), (wants_x, wants_A, wants_B, _) = ctx.saved_tensors, ctx.needs_input_grad
        grad_NO, inner_NR = grad.reshape(-1, grad.shape[-1]), inner.reshape(-1, inner.shape[-1])
        grad_NR = (grad_NO @ B_OR) * ctx.scale
        x_grad = (grad_NR @ A_RI).to(x.dtype).view_as(x) if wants_x else None
        A_grad_RI = grad_NR.T @ x.reshape(-1, x.shape[-1]).to(A_RI.dtype) if wants_A else None
        return x_grad, A_grad_RI, grad_NO.T @ inner_NR if wants_B else None, None


class Joined:
    """Each layer's matrices that read the same input as one: (weight_OI, bias_O) of q, k and v, and of gate and up."""

    def __init__(self, layers: Iterable[nn.Module], copy: Copy = lambda weight_OI: weight_OI):
        self.qkv: dict[int, tuple[Weight, Tensor | None]] = {}
        self.gate_up: dict[int, tuple[Weight, Tensor | None]] = {}
        for layer in layers:
            qkv, gate_up = _siblings(layer)
            self.qkv[layer.self_attn.layer] = _joined(copy, qkv)
            self.gate_up[layer.mlp.layer] = _joined(copy, gate_up)


class Copies:
    """Copies of a transformer's weights for decode steps on a CPU. Drop them before the weights change.

    Packed, if the library in use has an order of its own and num_steps steps earn it; those of matrices that read the
    same input are joined. In half precision plain ones are also joined, where they lie, because a product takes little
    longer than its launch (5% of a step; nothing in float32)."""

    def __init__(self, model: nn.Module, *, num_rows: int = 1, num_steps: float = 0.0, num_logits: int = 0):
        """num_rows: of a step. num_logits: rows of the output layer that are read; 0: none."""
        self.joined: Joined | None = None
        self.forwards: dict[nn.Module, Callable[..., Tensor]] = {}  # replacements for those of modules in the layers
        self.head_VD: Packed | None = None
        like, layers = next(model.parameters()), model.layers.values()
        pack = partial(packed, num_rows=num_rows)
        if not earns_packing(like, num_steps):
            are_adjacent = all(_is_adjacent(parts) for layer in layers for parts in _siblings(layer))
            self.joined = Joined(layers) if like.is_cpu and like.dtype.itemsize == 2 and are_adjacent else None
            return
        self.joined = Joined(layers, pack)
        rest = [module for layer in layers for module in (layer.self_attn.o_proj, layer.mlp.down_proj)]
        self.forwards = {module: partial(module.forward, weight=pack(module.weight)) for module in rest}
        if num_logits:
            self.head_VD = model.logits(like, head=lambda _, weight_VD: pack(weight_VD[:num_logits]))


@torch.no_grad()
def lay_adjacent(layers: Iterable[nn.Module]) -> None:
    """Moves the weights of each layer's matrices that read the same input to adjacent memory."""
    for layer in layers:
        for parts in _siblings(layer):
            whole_OI = torch.cat([part.weight for part in parts])
            for part, weight_OI in zip(parts, whole_OI.split([len(part.weight) for part in parts]), strict=True):
                part.weight.data = weight_OI


def _siblings(layer: nn.Module) -> tuple[list[nn.Linear], list[nn.Linear]]:
    """The matrices of a layer that read the same input: q, k and v, and gate and up."""
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]


@torch.no_grad()
def _joined(copy: Copy, parts: Sequence[nn.Linear]) -> tuple[Weight, Tensor | None]:
    weights = [part.weight for part in parts]
    if _is_adjacent(parts):
        weight_OI = weights[0].as_strided((sum(map(len, weights)), weights[0].shape[1]), weights[0].stride())
    else:
        weight_OI = torch.cat(weights)
    return copy(weight_OI), None if parts[0].bias is None else torch.cat([part.bias for part in parts])


def _is_adjacent(parts: Sequence[nn.Linear]) -> bool:
    """Whether weights lie one behind the other, so that they can be read as one."""
    weights = [part.weight for part in parts]
    return all(
        one.is_contiguous()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.data_ptr() + one.nbytes == other.data_ptr()
        for one, other in pairwise(weights)
    )
