"""Which code a process runs: the commit of its checkout, and the versions of packages."""

import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]  # where the package is, if it is not installed
CODE = ("rlhf_spmd", "kernels", "strategies")  # of the package, in its checkout
PACKAGES = ("torch", "triton", "deepspeed", "transformers", "mpi4py", "numpy")
LIMIT_S = 10.0  # for git, which may wait for a file system


def software() -> dict[str, str]:
    """Returns commit and versions, without what is not known or not installed."""
    versions = {name: version_of(name) for name in ("rlhf_spmd", *PACKAGES)}
    known = {"commit": commit(), "python": platform.python_version()} | versions
    return {name: text for name, text in known.items() if text}


def version_of(package: str) -> str | None:
    """Returns the version of a package; None: it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit(checkout: Path = CHECKOUT, code: Sequence[str] = CODE) -> str:
    """Returns the short hash of a checkout's commit, with `-dirty` if files in `code` differ from it; empty if it is
    not a checkout."""
    if not (checkout / ".git").exists():  # a copy without it may lie within another repository
        return ""
    found = _git(checkout, "rev-parse", "--short", "HEAD")
    return f"{found}-dirty" if found and _git(checkout, "status", "--porcelain", "--", *code) else found


def _git(checkout: Path, *words: str) -> str:
    """Returns what git prints; nothing where there is no git."""
    command = ["git", "--no-optional-locks", *words]
    try:
        done = subprocess.run(
            command, cwd=checkout, capture_output=True, encoding="utf-8", errors="replace", timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
