"""Imports Triton if it is needed, else defines a stand-in, so that the torch code of every kernel file works anywhere.

Triton compiles a kernel again for an integer that is 1, or a multiple of 16, unless the kernel says do_not_specialize.
Kernels say it of what differs between the launches of a run, the number of rows: else a kernel would be compiled and
loaded when the first batch of another kind arrives. Sizes of a model stay specialised, for wide loads.

Triton is needed on a GPU, under its interpreter, and by programs that imported it before (benches that compile without
a GPU). Other runs start 0.2 s earlier without it, and it need not be installed.
"""

import os
import sys

import torch

NEEDED = torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ or "triton" in sys.modules

try:
    if not NEEDED:
        raise ImportError
    import triton
    import triton.language as tl
except ImportError:  # if it is needed but missing, runtime/world/devices.py reports that before anything runs

    class _Absent:
        """Lets a kernel file be imported; its decorators, annotations and constants do nothing."""

        constexpr = float

        @staticmethod
        def jit(function=None, **options):
            return function or (lambda function: function)

    triton = tl = _Absent()

DEVICES = ("cuda",)  # on which kernels with a backward pass compute
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fused(x: torch.Tensor) -> bool:
    """Returns whether kernels compute with tensors like this one, where a CPU takes torch's operations."""
    return x.device.type in DEVICES and x.dtype in DTYPES


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    """Returns whether a backward pass would reach one of these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


__all__ = ["fused", "needs_gradient", "tl", "triton"]
