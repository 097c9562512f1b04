"""Triton where a run needs it, else a stand-in: the plain-torch half of every kernel file works anywhere.

It is needed on a GPU, under its interpreter, and by programs that have imported it before (benches that compile for a
GPU which is not there). A run on a CPU starts a fifth of a second earlier without it, and does not need it installed.
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
except ImportError:  # where it is needed after all, runtime/world/devices.py says so before anything runs

    class _Absent:
        """Lets a kernel file be imported: its decorators and annotations do nothing."""

        constexpr = None

        @staticmethod
        def jit(function):
            return function

    triton = tl = _Absent()

__all__ = ["tl", "triton"]
