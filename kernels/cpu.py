"""Kernels of our own for CPUs with AVX2 or AVX-512, written in C++ (kernels/native/), in float32 and bfloat16.

They are used for the dtypes whose products they compute (kernels/products.py), by all ranks of a job or none. Every
result depends on its own row only: not on other rows, threads, the order in memory of weights, or the instruction set.

Legend: N rows or tokens, I inputs, O outputs, B sequences, H heads, K key-value heads, d head dim, f pairs of a head,
n blocks of s slots, M blocks of a row's table, V vocabulary, D size of a normalised row.
"""

import importlib.util
import itertools
import platform
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)
LANES = 16  # head dims must be multiples of it
COMPILED = "rlhf_spmd.kernels._native"
NOT_COMPILED = "they were not compiled, which takes g++"
_used: set[torch.dtype] = set()


def _load():
    """Returns the compiled module (None: it can't be used), the columns of a panel, the instruction set, and why
    not."""
    try:
        from rlhf_spmd.kernels import _native as native
    except ImportError as error:
        return None, 0, "", NOT_COMPILED if importlib.util.find_spec(COMPILED) is None else str(error)
    for name in ("avx512", "avx2"):
        if columns := native.use(name):
            return native, columns, name, ""
    return None, 0, "", "this processor has no AVX2"


_native, COLUMNS, INSTRUCTIONS, _problem = _load()


def problem() -> str:
    """Returns why this machine cannot use them; empty if it can."""
    return _problem


def is_missing() -> bool:
    """Returns whether an installation with a compiler would have them."""
    return problem() == NOT_COMPILED and platform.machine() in ("x86_64", "AMD64")


def use(dtypes: Collection[torch.dtype]) -> None:
    """Sets for which dtypes this process uses them."""
    assert not dtypes or not problem(), problem()
    _used.clear()
    _used.update(dtypes)


def used_for(x: Tensor) -> bool:
    """Returns whether this process uses them for a tensor like x."""
    return x.dtype in _used and x.device.type == "cpu"


@dataclass(frozen=True, slots=True)
class Panels:
    """Weights [O, I] in the order in which `product` reads them: panels of COLUMNS outputs, the last one padded."""

    numbers: Tensor
    num_out: int


def pack(weight_OI: Tensor) -> Panels:
    """Returns a copy of the weights in that order."""
    weight_OI = weight_OI.contiguous()
    num_out, num_in = weight_OI.shape
    packed = weight_OI.new_empty(-(-num_out // COLUMNS) * COLUMNS, num_in)
    _native.pack(weight_OI.itemsize, weight_OI.data_ptr(), num_out, num_in, packed.data_ptr())
    return Panels(packed, num_out)


def product(x_NI: Tensor, weight_OI: Tensor | Panels, bias_O: Tensor | None = None) -> Tensor:
    """Returns x W^T + b -> y_NO, without a backward pass. Raises MemoryError if there is no room for its scratch."""
    is_packed = isinstance(weight_OI, Panels)
    if isinstance(weight_OI, Panels):
        numbers, num_out = weight_OI.numbers, weight_OI.num_out
    else:
        numbers, num_out = weight_OI, len(weight_OI)
    num_rows, num_in = x_NI.shape
    assert numbers.dtype == x_NI.dtype and numbers.shape[1] == num_in, (numbers.shape, x_NI.shape)
    x_NI = x_NI if x_NI.stride(1) == 1 else x_NI.contiguous()
    numbers = numbers if is_packed else numbers.contiguous()
    y_NO = x_NI.new_empty(num_rows, num_out)
    bias = 0 if bias_O is None else bias_O.data_ptr()
    addresses = x_NI.data_ptr(), numbers.data_ptr(), bias, y_NO.data_ptr()
    _native.product(x_NI.itemsize, *addresses, num_rows, num_in, num_out, x_NI.stride(0), num_out, is_packed)
    return y_NO


def products(x_AI: Tensor, weights: Sequence[Tensor] | Sequence[Panels], counts: Sequence[int]) -> Tensor:
    """Multiplies consecutive rows, counts[e] of them by matrix e, as `product` does -> y_AO. All matrices have one
    shape and are plain, or all are packed."""
    numbers = [one.numbers if isinstance(one, Panels) else one for one in weights]
    num_out = weights[0].num_out if isinstance(weights[0], Panels) else len(weights[0])
    num_rows, num_in = x_AI.shape
    assert sum(counts) == num_rows and all(one.dtype == x_AI.dtype and one.is_contiguous() for one in (x_AI, *numbers))
    y_AO = x_AI.new_empty(num_rows, num_out)
    addresses = torch.tensor([one.data_ptr() for one in numbers])
    starts = torch.tensor([0, *itertools.accumulate(counts)])
    pointers = (one.data_ptr() for one in (x_AI, addresses, starts, y_AO))
    _native.products(x_AI.itemsize, *pointers, len(numbers), num_in, num_out, isinstance(weights[0], Panels))
    return y_AO


def rmsnorm(x: Tensor, weight_D: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Normalises as kernels/rmsnorm.py; x is [T, D] or, without a residual, [T, H, D]."""
    num_heads, stride_head = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    assert x.stride(-1) == 1
    y = x.new_empty(x.shape)
    s = x if residual is None else x.new_empty(x.shape)
    added, stride_residual = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    assert residual is None or residual.stride(-1) == 1
    sizes = len(x), num_heads, x.shape[-1], x.stride(0), stride_head, stride_residual
    _native.norm(x.itemsize, x.data_ptr(), added, weight_D.data_ptr(), y.data_ptr(), s.data_ptr(), *sizes, eps)
    return y, s


def rotate(x_THd: Tensor, cos_Tf: Tensor, sin_Tf: Tensor) -> Tensor:
    """Rotates as kernels/rope.py."""
    num_tokens, num_heads, head_dim = x_THd.shape
    assert x_THd.stride(2) == 1 and cos_Tf.is_contiguous() and sin_Tf.is_contiguous()
    y_THd = x_THd.new_empty(x_THd.shape)
    addresses = x_THd.data_ptr(), cos_Tf.data_ptr(), sin_Tf.data_ptr(), y_THd.data_ptr()
    _native.turn(x_THd.itemsize, *addresses, num_tokens, num_heads, head_dim, x_THd.stride(0), x_THd.stride(1))
    return y_THd


def kv_write(x_TKd: Tensor, cache_nKsd: Tensor, slots_T: Tensor) -> None:
    """Writes as kernels/kv_write.py."""
    num_tokens, num_heads, head_dim = x_TKd.shape
    assert x_TKd.stride(2) == 1 and cache_nKsd.is_contiguous() and slots_T.dtype == torch.int64
    sizes = num_tokens, num_heads, head_dim, cache_nKsd.shape[2], x_TKd.stride(0), x_TKd.stride(1)
    _native.write(x_TKd.itemsize, x_TKd.data_ptr(), cache_nKsd.data_ptr(), slots_T.data_ptr(), *sizes)


def decode_attention(
    q_BHd: Tensor, keys_nKsd: Tensor, values_nKsd: Tensor, tables_BM: Tensor, lengths_B: Tensor, window: int | None
) -> Tensor:
    """Computes attention as kernels/decode_attention.py."""
    num_rows, num_heads, head_dim = q_BHd.shape
    num_kv_heads, block_size = keys_nKsd.shape[1:3]
    assert q_BHd.stride()[1:] == (head_dim, 1) and keys_nKsd.is_contiguous() and values_nKsd.is_contiguous()
    assert tables_BM.dtype == torch.int32 and lengths_B.dtype == torch.int64 and lengths_B.is_contiguous()
    out_BHd = q_BHd.new_empty(q_BHd.shape)
    tensors = q_BHd, keys_nKsd, values_nKsd, tables_BM, lengths_B, out_BHd
    sizes = num_rows, num_heads, num_kv_heads, head_dim, block_size, tables_BM.stride(0), q_BHd.stride(0), window or 0
    _native.attention(q_BHd.itemsize, *(x.data_ptr() for x in tensors), *sizes, head_dim**-0.5)
    return out_BHd


def silu_mul(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    """Computes silu(gate) * up as kernels/silu_mul.py."""
    assert gate_NI.stride(1) == up_NI.stride(1) == 1
    y_NI = gate_NI.new_empty(gate_NI.shape)
    sizes = *gate_NI.shape, gate_NI.stride(0), up_NI.stride(0)
    _native.gated(gate_NI.itemsize, gate_NI.data_ptr(), up_NI.data_ptr(), y_NI.data_ptr(), *sizes)
    return y_NI


def block_masses(
    logits_BV: Tensor, temperature_B: Tensor, block: int, *, offset: int = 0, least_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes block masses as kernels/sample_cpu.py."""
    num_rows, width = logits_BV.shape
    assert logits_BV.stride(1) == 1 and temperature_B.dtype == torch.float32
    num_blocks = -(-(offset + width) // block)
    max_B, masses_BN = torch.empty(num_rows), torch.empty(num_rows, num_blocks, dtype=torch.float64)
    least = 0 if least_B is None else least_B.data_ptr()
    addresses = logits_BV.data_ptr(), temperature_B.data_ptr(), least, max_B.data_ptr(), masses_BN.data_ptr()
    sizes = num_rows, width, logits_BV.stride(0), offset, block, num_blocks
    _native.masses(logits_BV.itemsize, *addresses, *sizes)
    return max_B, masses_BN
