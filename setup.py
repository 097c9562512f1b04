"""Compiles kernels/native, if there is a compiler; everything else is in setup.cfg.

Without one the install goes on, and a CPU uses torch's operations."""

import platform

from setuptools import Extension, setup

X86 = platform.machine() in ("x86_64", "AMD64")
native = Extension(
    "rlhf_spmd.kernels._native",
    sources=[f"kernels/native/{name}.cpp" for name in ("module", "avx2", "avx512")],
    depends=[
        f"kernels/native/{name}"
        for name in ("vector.hpp", "product.hpp", "attention.hpp", "rows.hpp", "operations.hpp", "table.h")
    ],
    extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-g0"],
    extra_link_args=["-fopenmp"],
    optional=True,
)
setup(ext_modules=[native] if X86 else [])
