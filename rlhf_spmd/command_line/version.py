"""The version of this program, its commit if it runs from a checkout, and the versions of the packages that matter most
to its results. Reads their metadata and imports none of them."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

PROGRAM = "rlhf-spmd"
PACKAGES = ("torch", "triton", "deepspeed", "transformers", "mpi4py")
MPI = ("mpich", "openmpi", "impi-rt")  # packages with an MPI library


def version_text() -> str:
    """Returns one line for the program, one for Python and the packages."""
    commit = _commit(Path(__file__).parents[2])
    found = [f"{name} {_version(name) or 'is not installed'}" for name in PACKAGES]
    library = [f"{name} {version}" for name in MPI if (version := _version(name))]
    found += library or ["the MPI library is that of the system (mpirun --version)"]
    own = f"{PROGRAM} {_version(PROGRAM) or '(not installed)'}" + (f" (commit {commit})" if commit else "")
    return f"{own}\nPython {platform.python_version()}, {', '.join(found)}"


def _version(package: str) -> str:
    """Returns the version of an installed package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit(folder: Path) -> str:
    """Returns the commit of a checkout, and `-dirty` if tracked files differ from it; empty if the folder is not a
    checkout."""
    if not (folder / ".git").exists():
        return ""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if not done.returncode else ""
