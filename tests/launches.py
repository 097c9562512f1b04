"""Records what the launchers in kernels/ would launch, compiled, without running it; needs no GPU.

Only dtypes, strides and alignment of tensors count. Not with TRITON_INTERPRET=1, which replaces the compiler.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Launch:
    """One call kernel[grid](...)."""

    kernel: str  # module.function
    compiled: CompiledKernel


class _Driver:
    """The properties of a GPU that the compiler asks for."""

    def __init__(self, target: GPUTarget):
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return str(self._target)  # compiled kernels are kept by device

    def get_current_stream(self, device: str) -> int:
        del device
        return 0


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.__name__}"


@contextmanager
def recorded(target: GPUTarget) -> Iterator[list[Launch]]:
    """Compiles launches for the target in this context and adds them to the list, without running them."""
    launches: list[Launch] = []
    run = JITFunction.run

    def record(kernel, *arguments, grid, warmup, **named):
        del warmup
        compiled = run(kernel, *arguments, grid=grid, warmup=True, **named)
        launches.append(Launch(name_of(kernel), compiled))
        return compiled

    JITFunction.run = record
    driver.set_active(_Driver(target))
    try:
        yield launches
    finally:
        JITFunction.run = run
        driver.set_active(None)  # found again by whoever asks next


def spilled_bytes(compiled: CompiledKernel) -> int:
    """Returns the bytes that a thread keeps in memory for want of registers: of machine code for NVIDIA, by the reader
    that comes with Triton, or of assembly for AMD."""
    if "amdgcn" in compiled.asm:
        return int(re.search(r"\.private_segment_fixed_size: *(\d+)$", compiled.asm["amdgcn"], re.MULTILINE)[1])
    reader = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [reader, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True).stdout
    return sum(map(int, re.findall(r"\b(?:STACK|LOCAL):(\d+)", printed)))
