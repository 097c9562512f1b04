"""Linear layers, and the copies of their weights that generation multiplies with."""

# N rows, D hidden, I inputs, O outputs, R rank of adapters, V vocabulary

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import compress, pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlhf_spmd.kernels.dropout import Dropout
from rlhf_spmd.kernels.products import Packed, earns_packing, in_use, packed, product
from rlhf_spmd.kernels.triton_import import fused
from rlhf_spmd.plan.adapters import Adapters, is_factor

Weight: TypeAlias = Tensor | Packed
Copy = Callable[[Tensor], Weight]  # a stacked weight -> itself, or its packed copy
Read = Callable[[nn.Linear], Tensor]  # a layer -> the weight to multiply with


class Linear(nn.Linear):
    """nn.Linear, computed by `product`."""

    def forward(self, x: Tensor, *, weight: Weight | None = None) -> Tensor:
        """Multiplies x by the weight.

        weight: a copy to use in the weight's place.
        """
        return product(x, self.weight if weight is None else weight, self.bias)


class Stacked(nn.Linear):
    """The matrices of a mixture's experts, one below the other."""

    def __init__(self, num: int, num_in: int, num_out: int):
        super().__init__(num_in, num * num_out, bias=False)
        self.num = num

    def forward(self, *, weight: Sequence[Weight] | None = None) -> Sequence[Weight]:
        """Returns the matrices. weight: copies to use in their place."""
        return self.weight.chunk(self.num) if weight is None else weight


class Adapted(nn.Module):
    """A linear layer with an adapter (plan/adapters.py), whose factors are never merged into the weight."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def adapt(self, adapters: Adapters, dtype: torch.dtype) -> None:
        """Makes the factors, without values."""
        num_out, num_in = self.weight.shape
        self.scale = adapters.scale
        self.lora_A = nn.Parameter(torch.empty(adapters.rank, num_in, dtype=dtype))
        self.lora_B = nn.Parameter(torch.empty(num_out, adapters.rank, dtype=dtype))

    @torch.no_grad()
    def sum(self) -> Tensor:
        """Returns W + s B A, a new tensor: computed in the precision of the factors, rounded once to that of W."""
        wide = self.lora_A.dtype
        return torch.addmm(self.weight.to(wide), self.lora_B, self.lora_A, alpha=self.scale).to(self.weight.dtype)


class AdaptedLinear(Linear, Adapted):
    """A `Linear` with an adapter, whose product a `LowRank` adds."""


Factors = tuple[Weight, Weight | list[Weight]]  # s A of all layers, stacked; B of all, block by block, or each B
# A cheap function and its inputs, which are kept anyway: the backward pass computes a tensor again and does not keep it
Again = tuple[Callable[..., Tensor], Sequence[Tensor]]


class LowRank(nn.Module):
    """Adds s B (A x) to the products of layers that read the same input: two products for all of them. Training,
    inference and generation compute the same, so they agree."""

    def __init__(self, layers: Sequence[nn.Linear], sites: Sequence[int] = (), features: range = range(0)):
        """layers: one or more of them have adapters. sites: the number of each that has, for dropout. features: the
        inputs that this rank has, of those of the whole layer."""
        super().__init__()
        self.sites, self.features = sites, features
        self.layers = (*layers,)  # a tuple, or their parameters would belong to this module, too
        self.adapted = (*(one for one in layers if isinstance(one, Adapted)),)
        self.sizes = [one.out_features for one in layers]

    def forward(
        self,
        x: Tensor,
        *parts: Tensor,
        factors: Factors | None = None,
        again: Again | None = None,
        dropout: Dropout | None = None,
    ) -> Sequence[Tensor]:
        """Adds the products of the factors with x [..., I] to those of the weights.

        parts: the products of the layers with their weights, or all of them joined; without gradients they change in
            place.
        factors: a copy of the layers' own.
        again: x, to be computed in the backward pass -> the sums, rounded once to the precision of parts.
        dropout: of x, for each adapter another one.
        """
        if factors is None:
            own = self.own
            if torch.is_grad_enabled() and any(one.requires_grad for one in (x, *own)):
                lows = _LowRank.apply(self, again or (_itself, (x,)), dropout, x, *own)
                return [part + low for part, low in zip(parts, lows, strict=True)]
            factors = self.factors(own)
        assert dropout is None, "only what trains has dropout"
        if len(parts) == 1 and not isinstance(factors[1], list):  # a decode step: each call counts
            (part,) = parts
            part += product(product(x, factors[0]), factors[1])
            return parts
        _, lows = self.products(x, factors, num=len(parts))
        for part, low in zip(parts, lows, strict=True):
            part += low
        return parts

    @property
    def own(self) -> list[Tensor]:
        """The A of each layer, then the B of each."""
        return [*(one.lora_A for one in self.adapted), *(one.lora_B for one in self.adapted)]

    @torch.no_grad()
    def factors(self, own: Sequence[Tensor], copy: Copy | None = None, *, scale: float = 1.0) -> Factors:
        """Returns what `products` takes, rounded to the precision of the weights. own: as of the property; scale: of
        s."""
        copy, dtype = copy or _itself, self.layers[0].weight.dtype
        As, Bs = own[: len(own) // 2], [B_OR.to(dtype) for B_OR in own[len(own) // 2 :]]
        A_RI = ((torch.cat(As) if len(As) > 1 else As[0]) * (self.adapted[0].scale * scale)).to(dtype)
        if len(self.layers) == 1:
            return copy(A_RI), copy(Bs[0])
        if len(A_RI) > MOST_JOINED:
            return copy(A_RI), [copy(B_OR) for B_OR in Bs]
        blocks = {**dict.fromkeys(self.layers), **dict(zip(self.adapted, Bs, strict=True))}
        rows = [A_RI.new_empty(size, 0) for size in self.sizes]  # of layers without an adapter
        B_OR = torch.block_diag(*(none if B is None else B for none, B in zip(rows, blocks.values(), strict=True)))
        return copy(A_RI), copy(B_OR)

    def products(
        self, x: Tensor, factors: Factors, *, num: int, dropout: Dropout | None = None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Returns s A x of all layers, [..., R]; and s B (A x) of each layer, or with num 1 of all."""
        A_RI, B = factors
        if dropout is None:
            inner = product(x, A_RI)
        else:
            parts = zip(self.masks(dropout), A_RI.chunk(len(self.adapted)), strict=True)
            inner = torch.cat([product(x.masked_fill(mask, 0.0), one_RI) for mask, one_RI in parts], dim=-1)
        if isinstance(B, list):
            made = iter([product(one, B_OR) for one, B_OR in zip(inner.chunk(len(B), dim=-1), B, strict=True)])
            with_adapter = [isinstance(one, Adapted) for one in self.layers]
            lows = [
                next(made) if has else inner.new_zeros(*inner.shape[:-1], size)
                for has, size in zip(with_adapter, self.sizes, strict=True)
            ]
            return inner, [torch.cat(lows, dim=-1)] if num == 1 else lows
        low = product(inner, B)
        return inner, [low] if num == 1 else low.split(self.sizes, dim=-1)

    def masks(self, dropout: Dropout) -> Iterator[Tensor]:
        """Yields which inputs of each adapter are dropped, bool [N, I]; one at a time, since each is as large as x."""
        return (dropout.mask(self.features, site) for site in self.sites)


MOST_JOINED = 96  # ranks of layers, in sum, up to which zeros between their B cost less than a product for each


class _LowRank(torch.autograd.Function):
    """s B (A x) of each layer. It keeps x as it is, not in the precision of the factors, or computes it again."""

    @staticmethod
    def forward(ctx, low_rank, again, dropout, x, *own):
        times = 1.0 if dropout is None else dropout.scale
        factors = low_rank.factors(own, scale=times)
        inner, lows = low_rank.products(x, factors, num=len(low_rank.layers), dropout=dropout)
        ctx.again, inputs = again
        ctx.save_for_backward(inner, *own, *(one.detach() for one in inputs))
        ctx.low_rank, ctx.dropout, ctx.times = low_rank, dropout, times
        return (*lows,)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        (inner, *saved), end = ctx.saved_tensors, 2 * len(ctx.low_rank.adapted)
        own, x = saved[:end], ctx.again(*saved[end:])
        (A_RI, _), wide = ctx.low_rank.factors(own, scale=ctx.times), own[0].dtype
        num, with_adapter = len(own) // 2, [isinstance(one, Adapted) for one in ctx.low_rank.layers]
        x_NI, inner_NR = (one.reshape(-1, one.shape[-1]).to(wide) for one in (x, inner))
        B_grads, inner_grads = [], []
        parts = zip(compress(grads, with_adapter), inner_NR.chunk(num, dim=-1), own[num:], strict=True)
        for grad, part_NR, B_OR in parts:
            grad_NO = grad.reshape(-1, grad.shape[-1]).to(wide)
            B_grads.append(grad_NO.T @ part_NR)
            inner_grads.append(grad_NO @ B_OR.to(x.dtype).to(wide))
        grad_NR = torch.cat(inner_grads, dim=-1)
        scale = ctx.low_rank.adapted[0].scale * ctx.times
        if ctx.dropout is None:
            A_grads = ((grad_NR.T @ x_NI) * scale).chunk(num)
            x_grad_NI = grad_NR @ A_RI.to(wide) if ctx.needs_input_grad[3] else None
        else:
            A_grads, x_grad_NI = [], torch.zeros_like(x_NI)
            for mask, one_NR, one_RI in zip(ctx.low_rank.masks(ctx.dropout), inner_grads, A_RI.chunk(num), strict=True):
                A_grads.append((one_NR.T @ x_NI.masked_fill(mask, 0.0)) * scale)
                x_grad_NI += (one_NR @ one_RI.to(wide)).masked_fill_(mask, 0.0)
        x_grad = x_grad_NI.to(x.dtype).view_as(x) if ctx.needs_input_grad[3] else None
        return None, None, None, x_grad, *A_grads, *B_grads


def together(x: Tensor, block: nn.Module, names: Sequence[str]) -> Sequence[Tensor]:
    """Multiplies x by layers of a block that read it -> y of each, or of all as one tensor.

    On GPUs adjacent weights are multiplied by one product, which takes fewer launches; without gradients its result is
    one. DeepSpeed's stage 3 gathers each weight for its module.
    """
    if fused(x):
        weights, biases = _parameters([block._modules[name] for name in names])  # not `fast_attributes`
        if _is_adjacent(weights) and _is_adjacent(biases) and not hasattr(weights[0], "ds_id"):
            weight_OI, bias_O = _as_one(weights), _as_one(biases) if biases else None
            if torch.is_grad_enabled():
                return _Together.apply(x, weight_OI, bias_O, *weights, *biases)
            return [product(x, weight_OI, bias_O)]
    return [getattr(block, name)(x) for name in names]


class _Together(torch.autograd.Function):
    """One product with several weights, whose gradients are parts of one, too."""

    @staticmethod
    def forward(ctx, x, weight_OI, bias_O, *own):
        sizes = [len(part) for part in own if part.dim() == 2]
        ctx.needs = [any(ctx.needs_input_grad[3:][of]) for of in (slice(len(sizes)), slice(len(sizes), None))]
        ctx.save_for_backward(x if ctx.needs[0] else None, weight_OI)
        return product(x, weight_OI, bias_O).split(sizes, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        (x, weight_OI), sizes = ctx.saved_tensors, [grad.shape[-1] for grad in grads]
        parts = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        grad_NO = _beside(parts)
        x_grad = (grad_NO @ weight_OI).view(*grads[0].shape[:-1], -1) if ctx.needs_input_grad[0] else None
        nothing = (None,) * len(sizes)
        of_weights = (grad_NO.T @ x.reshape(-1, x.shape[-1])).split(sizes) if ctx.needs[0] else nothing
        of_biases = grad_NO.sum(0).split(sizes) if ctx.needs[1] else nothing
        return x_grad, None, None, *of_weights, *of_biases[: len(ctx.needs_input_grad) - 3 - len(sizes)]


def _beside(parts: Sequence[Tensor]) -> Tensor:
    """Returns matrices side by side, without a copy if they are."""
    if _follow(parts, [part.shape[1] for part in parts]):
        return parts[0].as_strided((len(parts[0]), sum(part.shape[1] for part in parts)), parts[0].stride())
    return torch.cat(parts, dim=1)


Joined: TypeAlias = dict[nn.Module, tuple[Weight, Tensor | None]]  # block -> its `together` as one: weight_OI, bias_O


def join(layers: Iterable[nn.Module], copy: Copy | None = None, read: Read | None = None) -> Joined:
    """Joins the matrices of each block that read the same input."""
    copy, read = copy or _itself, read or _own_weight
    return {block: _joined(copy, parts, read) for layer in layers for block, parts in _siblings(layer)}


class Copies:
    """Copies of a transformer's weights for decode steps, and of its adapters. Drop them before the weights change.

    Packed on a CPU, if the library in use has an order of its own and num_steps steps earn it; those of matrices that
    read the same input are joined. In half precision plain ones are also joined, where they lie, because a product
    takes little longer than its launch (5% of a step; nothing in float32). A model with adapters keeps the packed
    copies of its base, which does not change, for the next round; unless its adapters are added to copies of its
    weights, which then have the products of a model without adapters, on any device."""

    def __init__(
        self,
        model: nn.Module,
        *,
        num_rows: int = 1,
        num_steps: float = 0.0,
        num_logits: int = 0,
        adds_adapters: bool = False,
    ):
        """Makes the copies of a model's weights with which a rank generates.

        num_rows: of a step.
        num_logits: rows of the output layer that are read; 0: none.
        adds_adapters: multiply with W + s B A.
        """
        self.joined: Joined | None = None
        self.forwards: dict[nn.Module, Callable | None] = {}  # replacements for those of modules in the layers
        self.head_VD: Packed | None = None
        like, layers = next(model.parameters()), model.layers.values()
        low_ranks = [module for layer in layers for module in layer.modules() if isinstance(module, LowRank)]
        adds_adapters = adds_adapters and bool(low_ranks)
        copy: Callable[[Tensor], Packed] | None = None
        base: _Weights | None = None
        if earns_packing(like, num_steps):
            copy = partial(packed, num_rows=num_rows)
            frozen = (one for name, one in model.named_parameters() if not is_factor(name))
            key = in_use(like.dtype).name, num_logits, *((one.data_ptr(), one._version) for one in frozen)
            base = model.kept if model.kept is not None and model.kept.key == key and not adds_adapters else None
            base = base or _Weights(model, copy, _sum if adds_adapters else _own_weight, key=key)
            model.kept = base if low_ranks and not adds_adapters else None
            if num_logits:
                base.head_VD = base.head_VD or model.logits(like[:1], head=lambda _, all_VD: copy(all_VD[:num_logits]))
            self.head_VD = base.head_VD
        elif adds_adapters:
            base = _Weights(model, _itself, _sum)
        elif like.is_cpu and like.dtype.itemsize == 2:
            are_adjacent = all(
                _is_adjacent([part.weight for part in parts]) for layer in layers for _, parts in _siblings(layer)
            )
            self.joined = join(layers) if are_adjacent else None
        if base is not None:
            self.joined = base.joined
            self.forwards = {module: partial(module.forward, weight=weight) for module, weight in base.rest.items()}
        for one in low_ranks:
            self.forwards[one] = None if adds_adapters else partial(one.forward, factors=one.factors(one.own, copy))


class _Weights:
    """Copies of all weights of the layers, with or without their adapters; and of the output layer, if it is packed."""

    def __init__(self, model: nn.Module, copy: Copy, read: Read, *, key: Hashable = None):
        """key: what they are made of."""
        self.key, layers = key, model.layers.values()
        self.joined, self.head_VD = join(layers, copy, read), None
        self.rest = {module: _copied(module, copy, read) for layer in layers for module in _rest(layer)}


def sum_bytes(model: nn.Module) -> int:
    """Returns the bytes of the copies of a model's weights with adapters in them, and of those that are joined with
    these."""
    layers = model.layers.values()
    sets = [parts for layer in layers for _, parts in _siblings(layer)]
    sets += [[one] for layer in layers for one in _rest(layer)]
    adapted = [parts for parts in sets if any(isinstance(part, Adapted) for part in parts)]
    return sum(part.weight.nbytes for parts in adapted for part in parts)


def _own_weight(layer: nn.Linear) -> Tensor:
    return layer.weight


def _sum(layer: nn.Linear) -> Tensor:
    return layer.sum() if isinstance(layer, Adapted) else layer.weight


def _itself(weight_OI: Tensor) -> Tensor:
    return weight_OI


@torch.no_grad()
def lay_adjacent(layers: Iterable[nn.Module]) -> None:
    """Moves the weights, and the biases, of each layer's matrices that read the same input to adjacent memory."""
    for layer in layers:
        for _, parts in _siblings(layer):
            for moved in filter(None, _parameters(parts)):
                for parameter, place in zip(moved, torch.cat(moved).split([*map(len, moved)]), strict=True):
                    parameter.data = place


def _siblings(layer: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Linear]]]:
    """Yields the blocks of a layer with matrices that read the same input (`together`), and these."""
    for block in (layer.self_attn, layer.mlp):
        if block.together:
            yield block, [getattr(block, name) for name in block.together]


def _parameters(parts: Sequence[nn.Linear]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the weights of matrices, and their biases if they have some."""
    return [part.weight for part in parts], [part.bias for part in parts if part.bias is not None]


def _rest(layer: nn.Module) -> list[nn.Linear]:
    """Returns the matrices of a layer that share their input with no other (`alone`)."""
    return [block.get_submodule(name) for block in (layer.self_attn, layer.mlp) for name in block.alone]


@torch.no_grad()
def _copied(module: nn.Linear, copy: Copy, read: Read) -> Weight | list[Weight]:
    return [*map(copy, module())] if isinstance(module, Stacked) else copy(read(module))


@torch.no_grad()
def _joined(copy: Copy, parts: Sequence[nn.Linear], read: Read) -> tuple[Weight, Tensor | None]:
    weights = [read(part) for part in parts]
    weight_OI = _as_one(weights) if _is_adjacent(weights) else torch.cat(weights)
    return copy(weight_OI), None if parts[0].bias is None else torch.cat([part.bias for part in parts])


def _as_one(parts: Sequence[Tensor]) -> Tensor:
    """Returns adjacent weights or biases as one tensor, of their memory."""
    first = parts[0].detach()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def _is_adjacent(weights: Sequence[Tensor]) -> bool:
    """Returns whether weights are adjacent in memory, so that they can be read as one."""
    return all(map(Tensor.is_contiguous, weights)) and _follow(weights, [*map(Tensor.numel, weights)])


def _follow(parts: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Returns whether each part begins so many numbers behind the one before it."""
    return all(
        part.untyped_storage()._cdata == other.untyped_storage()._cdata
        and part.storage_offset() + size == other.storage_offset()
        and part.stride() == other.stride()
        for (part, other), size in zip(pairwise(parts), sizes, strict=False)
    )
