"""Every Triton kernel at the shapes of 7B and 70B models, without a GPU: what it takes of one (compiled for an H100 and
for gfx942), the bytes that it moves for each that it has to move (counted in Triton's interpreter), and the time that
follows on an H100: a forecast to hold the first measurement against.

Fails where a kernel spills registers, or moves bytes twice without a reason in static_cases.py.

Cost: two minutes. Command: python -m bench kernels --static
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version

import torch

from bench.rows import REPOSITORY, provenance, write
from bench.speed.launches import H100, MI300, Launch, recorded
from bench.speed.occupancy import PROCESSORS, Resources, amd, nvidia
from bench.speed.static_cases import REASONS, WHOLE, Case, all_cases, needed_bytes
from bench.tables import ended
from rlhf_spmd.machines.calibration_file import load_calibration

TARGETS = ("sm_90", "gfx942")
CALIBRATION = "h100-80g"
VECTOR_OPS = 66.9e12 / 2  # float32 operations/s of an H100 SXM; its data sheet counts a fused multiply-add as two
EXCESS = 1.01  # bytes moved for each needed that want a reason
ROWS_RUN = 2  # programs of axis 0 that the interpreter runs
INTERPRETED = "TRITON_INTERPRET"


def launches_of(case: Case) -> list[tuple[Launch, Launch]]:
    """Returns the launches of a case, each compiled for an H100 and for gfx942; one of those that do the same work."""
    found: list[dict[tuple, Launch]] = []
    for target in (H100, MI300):
        with recorded(target) as launches:
            case.run(torch.device("meta"))
        found.append({})
        for launch in launches:
            found[-1].setdefault(launch.key, launch)
    return [(launch, found[1][key]) for key, launch in found[0].items()]


def count(case: Case) -> Iterator[dict]:
    """Yields the traffic of the launches of a case, in the same order; under the interpreter."""
    from bench.speed.traffic import counted

    with counted(rows=ROWS_RUN) as traffics:
        case.run(torch.device("cpu"))
    for one in traffics:
        needed = needed_bytes(one.launch.kernel, one.launch.arguments)
        yield {
            "kernel": one.launch.kernel,
            "launches": one.times,
            "needed_bytes": one.touched_bytes if needed is None else needed,
            "moved_bytes": one.moved_bytes,
            "matrix_flops": one.matrix_flops,
            "vector_ops": one.vector_ops,
        }


def counted_elsewhere() -> list[list[dict]]:
    """Runs `count` of every case, in a process whose kernels are interpreted."""
    environment = os.environ | {INTERPRETED: "1"}
    command = [sys.executable, "-m", "bench.speed.static_kernels"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, encoding="utf-8", errors="replace", check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def make_row(case: Case, launch: Launch, other: Launch, traffic: dict) -> dict:
    """Returns the facts of a launch, and whether it has no fault."""
    assert launch.kernel == traffic["kernel"], (launch.kernel, traffic)
    takes = dict(zip(TARGETS, (nvidia(launch.compiled), amd(other.compiled)), strict=True))
    num_programs = math.prod(launch.grid)
    row = {"bench": "kernels-static", "what": case.what, "shape": case.shape, "dtype": "bfloat16"} | traffic
    row |= {"grid": launch.grid, "waves": num_programs / (PROCESSORS * max(takes["sm_90"].programs, 1))}
    row |= {target: described(found) for target, found in takes.items()}
    row["moved_per_needed"] = row["moved_bytes"] / row["needed_bytes"]
    row["reason"] = REASONS.get(launch.kernel, "")
    row["forecast_s"], row["bound_by"] = forecast(traffic, num_programs)
    return row | {"ok": not faults(row)}


def described(found: Resources) -> dict:
    named = {name: getattr(found, name) for name in ("registers", "spill_bytes", "shared_bytes", "num_warps")}
    return named | {"programs": found.programs, "occupancy": found.occupancy}


def faults(row: dict) -> list[str]:
    """Returns the faults of a launch."""
    spills = [f"spills {row[on]['spill_bytes']} bytes on {on}" for on in TARGETS if row[on]["spill_bytes"]]
    idle = [f"does not fit on {on}" for on in TARGETS if not row[on]["programs"]]
    twice = row["moved_per_needed"] > EXCESS and not row["reason"]
    return spills + idle + ([f"moves {row['moved_per_needed']:.2f} bytes for each needed"] if twice else [])


def forecast(traffic: dict, num_programs: int) -> tuple[float, str]:
    """Returns seconds of one launch on an H100, and what takes them: the slowest of memory, matrix products and other
    arithmetic, the latter two on the processors that have a program. Nothing is added for launching it."""
    device, share = load_calibration(CALIBRATION).devices[CALIBRATION], min(num_programs / PROCESSORS, 1.0)
    seconds = {
        "memory": traffic["needed_bytes"] / device.memory_bytes_per_s,
        "matrix products": traffic["matrix_flops"] / (device.matrix_flops * share),
        "arithmetic": traffic["vector_ops"] / (VECTOR_OPS * share),
    }
    slowest = max(seconds, key=seconds.get)
    return seconds[slowest], slowest


def make_rows() -> Iterator[dict]:
    """Makes the rows: of a kernel that a case launches several times, the first launch (the last chunk of a vocabulary
    is narrower)."""
    about = {"calibration": CALIBRATION, "versions": provenance()["versions"] | {"triton": version("triton")}}
    seen = set()
    for case, traffics in zip(all_cases(), counted_elsewhere(), strict=True):
        kernels = set()
        for (launch, other), traffic in zip(launches_of(case), traffics, strict=True):
            known = launch.kernel in kernels or launch.key in seen
            if not known:
                yield make_row(case, launch, other, traffic) | about
            kernels.add(launch.kernel)
            if launch.kernel in WHOLE:  # what others move depends on the rule of the case
                seen.add(launch.key)


def main() -> int:
    if os.environ.get(INTERPRETED) == "1":
        sys.exit(f"bench kernels --static compiles kernels: run it without {INTERPRETED}=1")
    rows = list(make_rows())
    write("kernels_static", rows)
    wrong = {f"{row['kernel']} {row['what']} {row['shape']}": faults(row) for row in rows if not row["ok"]}
    for name, found in wrong.items():
        print(f"{name}: {', '.join(found)}")
    worst = {on: max(row[on]["registers"] for row in rows) for on in TARGETS}
    return ended("kernels-static", rows, registers=worst)


if __name__ == "__main__":  # the interpreted part
    for one in all_cases():
        print(json.dumps(list(count(one))), flush=True)
