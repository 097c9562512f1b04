"""Linear layers, and the copies of their weights that generation multiplies with."""

# D hidden, I inputs, O outputs, V vocabulary

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from rlhf_spmd.kernels.products import Packed, earns_packing, packed, product

Weight = Tensor | Packed
Copy = Callable[[Tensor], Weight]  # a stacked weight -> itself, or its packed copy


class Linear(nn.Linear):
    """nn.Linear, computed by `product`."""

    def forward(self, x: Tensor, *, weight: Packed | None = None) -> Tensor:
        """weight: a copy to use in the weight's place."""
        return product(x, self.weight if weight is None else weight, self.bias)


class Joined:
    """Stacked copies of each layer's matrices that read the same input: (weight_OI, bias_O) of q, k and v, and of gate
    and up."""

    def __init__(self, layers: Iterable[nn.Module], copy: Copy = lambda weight_OI: weight_OI):
        self.qkv: dict[int, tuple[Weight, Tensor | None]] = {}
        self.gate_up: dict[int, tuple[Weight, Tensor | None]] = {}
        for layer in layers:
            attention, mlp = layer.self_attn, layer.mlp
            self.qkv[attention.layer] = _stacked(copy, attention.q_proj, attention.k_proj, attention.v_proj)
            self.gate_up[mlp.layer] = _stacked(copy, mlp.gate_proj, mlp.up_proj)


class Copies:
    """Copies of a transformer's weights for decode steps on a CPU. Drop them before the weights change.

    Packed, if the library in use has an order of its own and num_steps steps earn it; those of matrices that read the
    same input are joined. In half precision these are joined at any rate, because a product takes little longer than
    its launch (5% of a step; nothing in float32)."""

    def __init__(self, model: nn.Module, *, num_rows: int = 1, num_steps: float = 0.0, num_logits: int = 0):
        """num_rows: of a step. num_logits: rows of the output layer that are read; 0: none."""
        self.joined: Joined | None = None
        self.forwards: dict[nn.Module, Callable[..., Tensor]] = {}  # replacements for those of modules in the layers
        self.head_VD: Packed | None = None
        like, layers = next(model.parameters()), model.layers.values()
        pack = partial(packed, num_rows=num_rows)
        if not earns_packing(like, num_steps):
            self.joined = Joined(layers) if like.is_cpu and like.dtype.itemsize == 2 else None
            return
        self.joined = Joined(layers, pack)
        rest = [module for layer in layers for module in (layer.self_attn.o_proj, layer.mlp.down_proj)]
        self.forwards = {module: partial(module.forward, weight=pack(module.weight)) for module in rest}
        if num_logits:
            self.head_VD = model.logits(like, head=lambda _, weight_VD: pack(weight_VD[:num_logits]))


@torch.no_grad()
def _stacked(copy: Copy, *parts: nn.Linear) -> tuple[Weight, Tensor | None]:
    bias_O = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    return copy(torch.cat([part.weight for part in parts])), bias_O
