"""`rlhf-spmd --version`: versions from metadata, at once, and the commit of a checkout."""

import subprocess
import sys
from pathlib import Path

from rlhf_spmd.command_line import version

FILE = Path(version.__file__)


def test_versions_are_printed_without_torch_and_mpi():
    code = (
        "import sys; from rlhf_spmd.__main__ import read\n"
        "try: read(['--version'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'mpi4py', 'pydantic'} & set(sys.modules), 'a heavy package is imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    own, packages = done.stdout.split("\n")[:2]
    assert own.startswith("rlhf-spmd ") and ("(commit " in own) == (FILE.parents[2] / ".git").exists()
    assert packages.startswith("Python 3.") and ", torch 2." in packages and ", mpi4py " in packages


def test_a_commit_is_that_of_a_checkout_alone(tmp_path):
    assert version._commit(tmp_path) == ""
    (tmp_path / ".git").write_text("no repository", encoding="utf-8")
    assert version._commit(tmp_path) == ""


def test_a_package_that_is_not_there(monkeypatch):
    monkeypatch.setattr(version, "PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setattr(version, "MPI", ())
    assert version.version_text().endswith(
        "no-such-package is not installed, the MPI library is that of the system (mpirun --version)"
    )
