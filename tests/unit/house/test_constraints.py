"""Installing leaves a torch that is there, and the Triton that it pins, as they are."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run_mpi import REPOSITORY

WANTED = [
    line.strip()
    for line in (REPOSITORY / "setup.cfg").read_text(encoding="utf-8").splitlines()
    if re.match(r"    (torch|triton)>=", line)
]


def installed(folder: Path, name: str, version: str, *requires: str) -> None:
    """Writes the metadata of a package, which is all that pip looks at."""
    about = folder / f"{name}-{version}.dist-info"
    about.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    (about / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("constraints", "torch", "triton"),
    [
        ("constraints-cuda.txt", "2.11.0+cu126", "3.6.0"),
        ("constraints-cuda.txt", "2.12.0+cu132", "3.7.0"),
        ("constraints-cuda.txt", "2.13.0+cu126", "3.7.1"),
        ("constraints-cuda.txt", "2.14.1+cu126", "3.8.0"),
        ("constraints.txt", "2.13.0", "3.7.1"),  # what a public index has
        ("constraints.txt", "2.13.0+cpu", "3.9.0"),
    ],
)
def test_a_torch_stays(constraints, torch, triton, tmp_path):
    installed(tmp_path, "torch", torch, f"triton=={triton}")
    installed(tmp_path, "triton", triton)
    command = [sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--no-index"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [*command, "-c", str(REPOSITORY / constraints), *WANTED],
        capture_output=True,
        encoding="utf-8",
        env=environment,
    )
    assert len(WANTED) == 2 and done.returncode == 0, done.stdout + done.stderr
    assert f"({torch})" in done.stdout and f"({triton})" in done.stdout and "Would install" not in done.stdout
