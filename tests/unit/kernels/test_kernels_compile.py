"""Every Triton kernel compiles to machine code for a GPU, whether or not there is one (tests/compile_kernels.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

ROOT = Path(__file__).parents[3]
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # that a program may have
SPILL_BYTES = {80: 16, 90: 0}  # on an A100 one version of the threshold's


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [(90, ("bfloat16",)), *(pytest.param(one, ("bfloat16", "float32"), marks=pytest.mark.slow) for one in (80, 90))],
)
def test_kernels_compile(capability, dtypes):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(ROOT / ".cache" / "triton"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.compile_kernels", str(capability), *dtypes]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert "decode_attention._split_kernel" in kernels
    missing = [name for name, row in kernels.items() if not row["versions"]]
    assert not missing, f"tests/compile_kernels.py has no case for {missing}"
    for name, row in kernels.items():
        assert row["shared_bytes"] <= SHARED_BYTES[capability] // 2, (name, row)  # two programs share a processor
        assert not row["for_rows"], f"{name} is compiled again for other numbers of rows"
        assert row["spill_bytes"] <= SPILL_BYTES[capability], (name, row)
