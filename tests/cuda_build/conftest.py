"""Loads Triton's compiler before the kernels, which else find out that there is no GPU."""

import triton  # noqa: F401
