"""What setup.cfg installs is all of the package: a wheel lacks what it does not name."""

import configparser
import subprocess
from fnmatch import fnmatch
from pathlib import Path

from tests.run_mpi import REPOSITORY


def test_every_file_of_the_package_is_installed():
    config = configparser.ConfigParser()
    config.read(REPOSITORY / "setup.cfg")
    packages, data = config["options"]["packages"].split(), config["options.package_data"]
    listed = subprocess.run(
        ["git", "ls-files", "rlhf_spmd"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    missing = []
    for file in map(Path, listed.stdout.splitlines()):
        package = next(name for parent in file.parents if (name := ".".join(parent.parts)) in packages)
        rest = file.relative_to(package.replace(".", "/"))
        patterns = ["*.py"] * (len(rest.parts) == 1) + data.get(package, "").split()
        if not any(fnmatch(str(rest), pattern) for pattern in patterns):
            missing.append(str(file))
    assert not missing, f"setup.cfg names neither package nor data of {missing}"
