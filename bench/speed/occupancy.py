"""What a compiled kernel takes of a GPU (registers, memory for spilled ones, shared memory), and how many of its
programs a processor therefore runs at once.

Limits of compute capability 9.0: CUDA C++ programming guide, "Technical specifications per compute capability"; of
gfx942: AMD Instinct MI300 instruction set architecture, chapters 3 and 11.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import triton
from triton.compiler import CompiledKernel

PROCESSORS = 132  # of an H100 SXM
REGISTERS, REGISTERS_AT_ONCE = 65536, 256  # of a processor; given to a warp in these steps
PARTS = 4  # of a processor; each has a quarter of the registers, and a warp stays in one
WARPS, PROGRAMS = 64, 32  # that a processor holds at most
SHARED_BYTES, SHARED_AT_ONCE, SHARED_RESERVED = 228 * 1024, 128, 1024  # of a processor; in steps; for each program
AMD_SHARED_BYTES, AMD_WAVES = 64 * 1024, 8  # of a compute unit; of each of its PARTS


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one program, but for registers and spill_bytes, which count for each thread.

    spill_bytes: in memory for want of registers, arrays of a thread included. Scalar registers that an AMD device keeps
    in lanes of vector registers take no memory and are not counted.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int
    programs: int  # that a processor holds at once

    @property
    def occupancy(self) -> float:
        """Warps that a processor holds, of the most that it can hold."""
        return self.programs * self.num_warps / WARPS


@cache
def nvidia(compiled: CompiledKernel) -> Resources:
    """Reads machine code for compute capability 9.0, by the reader that comes with Triton."""
    reader = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [reader, "--dump-resource-usage", file.name],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=True,
        )
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said.stdout))
    registers, warps, shared = int(found["REG"]), compiled.metadata.num_warps, compiled.metadata.shared
    spilled = int(found["STACK"]) + int(found["LOCAL"])
    return Resources(registers, spilled, shared, warps, programs_at_once(registers, shared, warps))


def programs_at_once(registers: int, shared_bytes: int, num_warps: int) -> int:
    """Returns the programs that a processor of compute capability 9.0 holds.

    registers: of a thread.
    """
    of_warp = _steps(registers * 32, REGISTERS_AT_ONCE)
    warps = REGISTERS // PARTS // of_warp * PARTS
    shared = _steps(shared_bytes, SHARED_AT_ONCE) + SHARED_RESERVED
    return min(warps // num_warps, WARPS // num_warps, PROGRAMS, SHARED_BYTES // shared)


def amd(compiled: CompiledKernel) -> Resources:
    """Reads assembly for gfx942."""
    found = dict(re.findall(r"\.(\w+): *(\d+)$", compiled.asm["amdgcn"], re.MULTILINE))
    waves = int(re.search(r"; Occupancy: (\d+)", compiled.asm["amdgcn"])[1])  # in each part, as registers allow
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    programs = PARTS * min(waves, AMD_WAVES) // warps
    if shared:
        programs = min(programs, AMD_SHARED_BYTES // shared)
    return Resources(int(found["vgpr_count"]), int(found["private_segment_fixed_size"]), shared, warps, programs)


def _steps(amount: int, step: int) -> int:
    return -(-amount // step) * step
