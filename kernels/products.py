"""Products of inputs and weights by the library that this process uses for their dtype.

    y_no = sum_i x_ni W_oi + b_o

Which library is fastest depends on the machine, so it is chosen by measuring (runtime/profile/products.py). A process
uses one library per dtype for all passes, because libraries differ in the order of their sums. What may differ between
passes is the order in which weights lie in memory: a library gives the same bits for plain weights, for weights packed
in its own order, and for several matrices joined (tests/unit/kernels/test_products.py).

- linear: F.linear. It has no packed weights.
- onednn: private operators of torch without a derivative, called inside `_Product` and where no gradient is needed. A
  row has the same bits beside any other rows, at any place, on any number of threads; alone it would not, so a single
  row is computed twice. The first product with a number of rows takes up to 90 ms, so rows are padded to few numbers.
- native: kernels of our own (cpu.py), which then compute the other operations of a decode step, too. A row has the same
  bits beside any other rows, and alone.

Backward products are chosen apart: they are torch.mm's, or kernels of our own. GPUs, float64, float16 and mixed dtypes
use F.linear.

Legend: N rows, I inputs, O outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_spmd.kernels import cpu

MANY_ROWS = 64  # kernels/native/product.hpp
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # for which a library is chosen


class Library(Protocol):
    """A way to compute products on a CPU."""

    name: str
    packs: bool  # whether it has an order of its own for weights
    prepares: bool  # whether the first product with a number of rows takes long

    def exists(self, dtype: torch.dtype) -> bool:
        """Returns whether this machine has it: its operators run, and agree with F.linear on a small product."""

    def multiply(self, x_NI: Tensor, weight_OI: Tensor | cpu.Panels, bias_O: Tensor | None) -> Tensor:
        """Returns y_NO, without a derivative. N >= 1.

        weight_OI: plain, or as `pack` made it.
        """

    def pack(self, weight_OI: Tensor, num_rows: int) -> Tensor | cpu.Panels:
        """Returns a copy of the weights in the library's order, made for num_rows rows; `multiply` takes it with any
        number."""


class Linear:
    """F.linear."""

    name, packs, prepares = "linear", False, False

    def exists(self, dtype: torch.dtype) -> bool:
        return True

    def multiply(self, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        return F.linear(x_NI, weight_OI, bias_O)

    def pack(self, weight_OI: Tensor, num_rows: int) -> Tensor:
        return weight_OI


class OneDNN:
    """oneDNN's inner product."""

    name, packs, prepares = "onednn", True, True

    def exists(self, dtype: torch.dtype) -> bool:
        return _agrees(self, dtype)

    def multiply(self, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        num_rows = len(x_NI)
        if num_rows == 1:
            return self.multiply(torch.cat((x_NI, x_NI)), weight_OI, bias_O)[:1]
        if (more := _few_sizes(num_rows)) > num_rows:
            return self.multiply(F.pad(x_NI, (0, 0, 0, more - num_rows)), weight_OI, bias_O)[:num_rows]
        return torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")

    def pack(self, weight_OI: Tensor, num_rows: int) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight_OI, max(num_rows, 2))


class Native:
    """Kernels of our own."""

    name, packs, prepares = "native", True, False

    def exists(self, dtype: torch.dtype) -> bool:
        return dtype in cpu.DTYPES and not cpu.problem() and _agrees(self, dtype)

    def multiply(self, x_NI: Tensor, weight_OI: Tensor | cpu.Panels, bias_O: Tensor | None) -> Tensor:
        return cpu.product(x_NI, weight_OI, bias_O)

    def pack(self, weight_OI: Tensor, num_rows: int) -> cpu.Panels:
        return cpu.pack(weight_OI)


def _few_sizes(num_rows: int) -> int:
    """Rounds a number up to one of 8 for each power of two; of 16 from 256 on, where more rows cost more."""
    step = 1 << max((num_rows - 1).bit_length() - (4 if num_rows <= 256 else 5), 0)
    return -(-num_rows // step) * step


def _native_mm(a_NM: Tensor, b_MK: Tensor) -> Tensor:
    return cpu.product(a_NM.contiguous(), b_MK.T.contiguous())


LINEAR, NATIVE = Linear(), Native()
LIBRARIES: dict[str, Library] = {one.name: one for one in (LINEAR, OneDNN(), NATIVE)}
BACKWARD = {"linear": torch.mm, "native": _native_mm}  # products [N, M] x [M, K] of a backward pass


def _agrees(library: Library, dtype: torch.dtype) -> bool:
    """Returns whether a library multiplies as F.linear does, with plain and packed weights, up to rounding."""
    x_NI, weight_OI, bias_O = (torch.arange(1.0, 1 + n * m).view(n, m).sin().to(dtype) for n, m in _SMALL)
    with torch.no_grad():
        wanted_NO = F.linear(x_NI.double(), weight_OI.double(), bias_O[0].double())
        try:
            weights = (weight_OI, library.pack(weight_OI, len(x_NI)))
            found = [library.multiply(x_NI, one, bias_O[0]) for one in weights]
        except (AttributeError, RuntimeError):  # no such operator, or not for this dtype on this processor
            return False
    far = 64 * torch.finfo(dtype).eps
    return all(y.dtype == dtype and (y.double() - wanted_NO).abs().max() <= far for y in found)


_SMALL = ((3, 48), (40, 48), (1, 40))  # the shapes of x, weight and bias


# ---- the libraries of this process -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """The library of a dtype, that of its backward products (one of BACKWARD), and seconds per byte of weights: of a
    decode step with plain and with packed weights, and of packing. By default those of two cores of an AMD EPYC."""

    library: str = "linear"
    backward: str = "linear"
    plain_s: float = 2.0e-10
    packed_s: float = 1.6e-10
    pack_s: float = 1.0e-9

    def packs(self, num_steps: float) -> bool:
        """Returns whether packing is earned by this number of decode steps."""
        return self.pack_s < num_steps * (self.plain_s - self.packed_s)


_chosen: dict[torch.dtype, tuple[Library, Choice]] = {}


def use(table: Mapping[str, Choice]) -> None:
    """Sets the libraries of this process by the names of dtypes; F.linear for those that are missing."""
    _chosen.clear()
    _chosen.update({DTYPES[name]: (LIBRARIES[one.library], one) for name, one in table.items()})
    cpu.use([dtype for dtype, (library, _) in _chosen.items() if library is NATIVE])


def in_use(dtype: torch.dtype) -> Library:
    """Returns the library for products of CPU tensors of this dtype."""
    return _chosen[dtype][0] if dtype in _chosen else LINEAR


def rows_for(num_rows: int, dtype: torch.dtype) -> int:
    """Returns the number of rows to which a pass over so many tokens is padded, so that each product is soon not the
    first with its number of rows."""
    return _few_sizes(num_rows) if in_use(dtype).prepares else num_rows


@dataclass(frozen=True, slots=True)
class Packed:
    """A copy of a weight in the order of its library, to be given to `product` in its place. Drop it before the weight
    changes."""

    library: Library
    weight: Tensor | cpu.Panels
    num_out: int


def earns_packing(weight_OI: Tensor, num_steps: float) -> bool:
    """Returns whether weights like this one should be packed for this number of decode steps."""
    if not weight_OI.is_cpu or weight_OI.dtype not in _chosen:
        return False
    library, choice = _chosen[weight_OI.dtype]
    return library.packs and choice.packs(num_steps)


@torch.no_grad()
def packed(weight_OI: Tensor, num_rows: int) -> Packed:
    """Returns a packed copy, for products of about num_rows rows."""
    library = in_use(weight_OI.dtype)
    return Packed(library, library.pack(weight_OI, num_rows), len(weight_OI))


# ---- the product -----------------------------------------------------------------------------------------------------


def product(
    x: Tensor, weight_OI: Tensor | Packed, bias_O: Tensor | None = None, *, library: Library | None = None
) -> Tensor:
    """Multiplies x [..., I] -> [..., O], differentiable once if the weight is not packed.

    library: used for float32 in a run whose library is chosen for another dtype; None: the one in use for x.
    """
    if isinstance(weight_OI, Packed):
        return _multiply(weight_OI.library, x, weight_OI.weight, bias_O, weight_OI.num_out)
    library = library or _library(x, weight_OI)
    if library is LINEAR:
        return F.linear(x, weight_OI, bias_O)
    if torch.is_grad_enabled() and (x.requires_grad or weight_OI.requires_grad or _learns(bias_O)):
        return _Product.apply(x, weight_OI, bias_O, library)
    return _multiply(library, x, weight_OI, bias_O, len(weight_OI))


def multiplies_at_once(x: Tensor, weights: Sequence[Tensor | Packed], counts: Sequence[int]) -> bool:
    """Returns whether `products` exists for these: no gradient is asked, and the library is our own. Many rows of a
    matrix that is not packed are faster by `product`, which packs it."""
    one = weights[0]
    library = one.library if isinstance(one, Packed) else _library(x, one)
    return library is NATIVE and not torch.is_grad_enabled() and (isinstance(one, Packed) or max(counts) <= MANY_ROWS)


def products(x_AI: Tensor, weights: Sequence[Tensor | Packed], counts: Sequence[int]) -> Tensor:
    """Multiplies consecutive rows, counts[e] of them by matrix e, in one call -> y_AO, with the bits of `product`."""
    return cpu.products(x_AI, [one.weight if isinstance(one, Packed) else one for one in weights], counts)


def product_in(out_NO: Tensor, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Multiplies without a derivative; the result lies in out_NO if the library can write there."""
    library = _library(x_NI, weight_OI)
    if library is LINEAR:
        return torch.mm(x_NI, weight_OI.T, out=out_NO)
    return _multiply(library, x_NI, weight_OI, None, len(weight_OI))


def _library(x: Tensor, weight_OI: Tensor) -> Library:
    is_chosen = x.dtype in _chosen and x.dtype == weight_OI.dtype and x.is_cpu
    return _chosen[x.dtype][0] if is_chosen else LINEAR


def _learns(bias_O: Tensor | None) -> bool:
    return bias_O is not None and bias_O.requires_grad


def _multiply(library: Library, x: Tensor, weight: Tensor | cpu.Panels, bias_O: Tensor | None, num_out: int) -> Tensor:
    x_NI = x.reshape(-1, x.shape[-1])
    if not len(x_NI):
        return x.new_empty(*x.shape[:-1], num_out)
    return library.multiply(x_NI.contiguous(), weight, bias_O).view(*x.shape[:-1], num_out)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_OI, bias_O, library):
        ctx.save_for_backward(x if weight_OI.requires_grad else None, weight_OI)
        ctx.mm = BACKWARD[_chosen[x.dtype][1].backward] if x.dtype in _chosen else torch.mm
        return _multiply(library, x, weight_OI, bias_O, len(weight_OI))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x, weight_OI), (wants_x, wants_weight, wants_bias, _) = ctx.saved_tensors, ctx.needs_input_grad
        grad_NO = grad.reshape(-1, grad.shape[-1])
        x_grad = ctx.mm(grad_NO, weight_OI).view(*grad.shape[:-1], -1) if wants_x else None
        weight_grad_OI = ctx.mm(grad_NO.T, x.reshape(-1, x.shape[-1])) if wants_weight else None
        return x_grad, weight_grad_OI, grad_NO.sum(0) if wants_bias else None, None
