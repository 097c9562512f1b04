"""Every Triton kernel compiles to machine code for a GPU, whether or not there is one (tests/compile_kernels.py)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

ROOT = Path(__file__).parents[3]
SHARED_BYTES = {"80": 163 * 1024, "90": 227 * 1024, "120": 99 * 1024, "gfx942": 64 * 1024}  # that a program may have
SPILL_BYTES = {"80": 16, "90": 0, "120": 0, "gfx942": 0}  # on an A100 one version of the threshold's
TRITONS = re.search(r"^TRITONS := (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1].split()


@pytest.mark.parametrize(
    ("target", "dtypes"),
    [
        ("90", ("bfloat16", "--few")),
        *(pytest.param(one, ("bfloat16", "float32"), marks=pytest.mark.slow) for one in ("80", "90", "120")),
        pytest.param("gfx942", ("bfloat16",), marks=pytest.mark.slow),
    ],
)
def test_kernels_compile(target, dtypes):
    check(target, dtypes)


@pytest.mark.slow  # a minute each
@pytest.mark.parametrize("version", TRITONS)
def test_no_kernel_spills_with_the_tritons_of_torch_for_cuda(version):
    """`make test-slow` fetches these Tritons."""
    folder = ROOT / ".cache" / f"triton-{version}"
    if not folder.is_dir():
        why = folder.with_name(f"{folder.name}.why")
        pytest.skip(why.read_text(encoding="utf-8")[-200:] if why.exists() else f"make {folder.relative_to(ROOT)}")
    check("90", ("bfloat16",), PYTHONPATH=str(folder))


def check(target, dtypes, **more):
    """Compiles in a process with Triton's compiler. more: variables of its environment."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(ROOT / ".cache" / "triton"), "CUDA_VISIBLE_DEVICES": "", **more}
    command = [sys.executable, "-m", "tests.compile_kernels", target, *dtypes]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert "decode_attention._split_kernel" in kernels
    missing = [name for name, row in kernels.items() if not row["versions"]]
    assert not missing, f"tests/compile_kernels.py has no case for {missing}"
    for name, row in kernels.items():
        assert row["shared_bytes"] <= SHARED_BYTES[target] // 2, (name, row)  # two programs share a processor
        assert not row["for_rows"], f"{name} is compiled again for other numbers of rows"
        assert row["spill_bytes"] <= SPILL_BYTES[target], (name, row)
