"""bench kernels --static: bytes are counted right, spills and needless second reads are found, and there are none."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from bench.speed import static_cases as cases
from bench.speed.static_kernels import faults
from rlhf_spmd.kernels.triton_import import tl, triton

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="counts are made by Triton's interpreter")
# More registers than a thread can have: 16,384 numbers of a row among 32 or 64 threads.
SPILLING = """
import dataclasses, json, torch
from bench.speed.launches import H100, MI300, recorded
from bench.speed.occupancy import amd, nvidia
from rlhf_spmd.kernels.rmsnorm import _rmsnorm_kernel, rmsnorm_triton
found = {}
for name, target, takes in (("sm_90", H100, nvidia), ("gfx942", MI300, amd)):
    x = torch.empty(8, 4096, dtype=torch.bfloat16, device="meta")
    with recorded(target) as launches:
        rmsnorm_triton(x, x[0], 1e-5, x)
        _rmsnorm_kernel[(1,)](x, x, x, x, x, 1, 1, 16384, 1e-5, 0, 0, 0, 0, ADDS=True, R=1, D=16384, num_warps=1)
    found[name] = [dataclasses.asdict(takes(launch.compiled)) for launch in launches]
print(json.dumps(found))
"""
TRITONS = re.search(r"^TRITONS := (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1].split()
TABLE = "import json; from bench.speed.static_kernels import make_rows; print(json.dumps(list(make_rows())))"
SPILLS = """
import json, triton
from bench.speed.occupancy import amd, nvidia
from bench.speed.static_cases import all_cases
from bench.speed.static_kernels import TARGETS, described, faults, launches_of
seen, wrong = set(), {}
for case in all_cases():
    for ours, other in launches_of(case):
        if ours.key not in seen:
            takes = zip(TARGETS, (nvidia(ours.compiled), amd(other.compiled)), strict=True)
            row = {"moved_per_needed": 1.0, "reason": ""} | {on: described(found) for on, found in takes}
            if found := faults(row):
                wrong[f"{ours.kernel} {case.what} {case.shape}"] = found
        seen.add(ours.key)
print(json.dumps([triton.__version__, sorted({key[0] for key in seen}), wrong]))
"""


def compiled(script: str, *folders: Path):
    """Returns what a script prints last, in a process with Triton's compiler. folders: of packages that come first."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(ROOT / ".cache" / "triton"),
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
    }
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def counts(run, rows=None) -> dict:
    from bench.speed.traffic import counted

    with counted(rows) as traffics:
        run(CPU)
    return {one.launch.kernel.partition(".")[2]: one for one in traffics}


@interpreted
def test_bytes_are_those_counted_by_hand():
    silu = counts(partial(cases.gate, num=3, inner=1100))["_silu_mul_kernel"]
    assert (silu.read_bytes, silu.written_bytes) == (2 * 3 * 1100 * 2, 3 * 1100 * 2)
    norm = counts(partial(cases.normalise, num=3, size=4096, adds=True))["_rmsnorm_kernel"]
    assert (norm.read_bytes, norm.written_bytes) == (3 * 3 * 4096 * 2, 2 * 3 * 4096 * 2)  # the weights in every row
    assert norm.touched_bytes == (4 * 3 + 1) * 4096 * 2

    found = counts(partial(cases.attend, rows=2, context=256, heads=(6, 2, 16)))  # four parts of 128 tokens, two empty
    split, pairs = found["_split_kernel"], 2 * 2
    cache, queries = 2 * pairs * 256 * 16 * 2, 4 * pairs * 3 * 16 * 2
    assert split.launch.grid == (2, 2, 4)
    assert split.read_bytes == cache + queries + pairs * (256 // 16) * 4 + 4 * pairs * 4
    assert split.written_bytes == pairs * 3 * (2 * 16 * 4 + 4 * 4)
    assert split.matrix_flops == pairs * 2 * (2 * 2 * 16 * 128 * 16)  # three queries are padded to sixteen
    assert found["_merge_kernel"].read_bytes == split.written_bytes

    statistics = counts(partial(cases.score, num=3, vocab=300, entropy=False))["_statistics_kernel"]
    assert statistics.read_bytes == 3 * (300 * 2 + 8 + 2) and statistics.written_bytes == 3 * 16
    blocks = counts(partial(cases.draw, rows=2, vocab=1100, rule="plain"))
    assert blocks["_blocks_kernel"].read_bytes == 2 * (1100 * 2 + 4)
    draw = blocks["_draw_kernel"]  # its masses, one block of logits and the drawn one again
    assert draw.written_bytes == 2 * (8 + 3 * 4) and draw.read_bytes <= 2 * (3 * 8 + 8 + 2 * 4 + 512 * 2 + 2)


@triton.jit
def _twice_kernel(x_ptr, y_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_ptr + at, tl.load(x_ptr + at) + tl.load(x_ptr + (at + 1) % N))


@interpreted
def test_a_second_read_is_found():
    x, y = torch.zeros(64), torch.zeros(64)
    one = counts(lambda device: _twice_kernel[(1,)](x, y, N=64))["_twice_kernel"]
    assert (one.read_bytes, one.written_bytes, one.touched_bytes) == (512, 256, 512)
    row = {"moved_per_needed": one.moved_bytes / one.touched_bytes, "reason": ""}
    row |= {on: {"spill_bytes": 0, "programs": 4} for on in ("sm_90", "gfx942")}
    assert faults(row) == ["moves 1.50 bytes for each needed"]
    assert not faults(row | {"reason": "to be shifted"})
    assert faults(row | {"reason": "x", "gfx942": {"spill_bytes": 0, "programs": 0}}) == ["does not fit on gfx942"]


@pytest.mark.slow  # compiles a kernel that is too large for its registers, for two makers
def test_a_spill_is_found():
    found = compiled(SPILLING)
    for on, (kept, spilling) in found.items():
        assert kept["spill_bytes"] == 0 and 10 < kept["registers"] < 128 and kept["programs"] >= 4, on
        assert spilling["spill_bytes"] > 100, on
    row = {"moved_per_needed": 1.0, "reason": ""} | {on: takes[1] for on, takes in found.items()}
    assert [fault.split()[0] for fault in faults(row)] == ["spills", "spills"]


@pytest.mark.slow  # two minutes
def test_no_kernel_spills_or_reads_twice_without_a_reason():
    rows = compiled(TABLE)
    assert not {f"{row['kernel']} {row['what']} {row['shape']}": faults(row) for row in rows if not row["ok"]}
    assert {row["kernel"] for row in rows} >= cases.WHOLE.keys() | cases.REASONS.keys()


@pytest.mark.slow  # a minute each
@pytest.mark.parametrize("triton_version", TRITONS)
def test_no_kernel_spills_with_the_tritons_of_torch_for_cuda(triton_version):
    """Only compiled: the bytes do not depend on the compiler. `make test-slow` fetches these Tritons."""
    folder = ROOT / ".cache" / f"triton-{triton_version}"
    if not folder.is_dir():
        why = folder.with_name(f"{folder.name}.why")
        pytest.skip(why.read_text(encoding="utf-8")[-200:] if why.exists() else f"make {folder.relative_to(ROOT)}")
    used, kernels, wrong = compiled(SPILLS, folder)
    assert used == triton_version and not wrong
    assert set(kernels) >= cases.WHOLE.keys() | cases.REASONS.keys()
