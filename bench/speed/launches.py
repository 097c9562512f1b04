"""Records what the launchers in kernels/ would launch, without running it; needs no GPU.

The launchers choose grids, block sizes and numbers of warps; these are taken from them, not repeated. Tensors may be on
device "meta": only dtypes, strides and alignment count. Not with TRITON_INTERPRET=1, which replaces the compiler.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

H100 = GPUTarget("cuda", 90, 32)
MI300 = GPUTarget("hip", "gfx942", 64)


@dataclass(frozen=True)
class Launch:
    """One call kernel[grid](...)."""

    kernel: str  # module.function
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # by name, those of type constexpr included
    compiled: CompiledKernel | None = None

    @property
    def key(self) -> tuple:
        """Equal for launches that do the same work: kernel, grid and numbers, shapes and dtypes of tensors."""
        values = ((x.dtype, tuple(x.shape)) if hasattr(x, "shape") else x for x in self.arguments.values())
        return (self.kernel, self.grid, *values)


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


def bound(kernel: Any, arguments: tuple, named: dict) -> dict[str, Any]:
    """Returns the arguments of a launch by name, without options such as num_warps."""
    return dict(zip(kernel.arg_names, arguments, strict=False)) | {
        name: value for name, value in named.items() if name in kernel.arg_names
    }


@contextmanager
def recorded(target: GPUTarget) -> Iterator[list[Launch]]:
    """Compiles launches for the target in this context and adds them to the list, without running them."""
    launches: list[Launch] = []
    run = JITFunction.run

    def record(kernel, *arguments, grid, warmup, **named):
        del warmup
        compiled = run(kernel, *arguments, grid=grid, warmup=True, **named)
        launches.append(Launch(name_of(kernel), tuple(grid), bound(kernel, arguments, named), compiled))
        return compiled

    JITFunction.run = record
    driver.set_active(_Driver(target))
    try:
        yield launches
    finally:
        JITFunction.run = run
        driver.set_active(None)  # found again by whoever asks next
