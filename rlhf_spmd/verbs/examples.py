"""The examples subcommand: writes the files of options that come with the package, with their data and a notebook."""

import argparse
import shutil
from pathlib import Path

import rlhf_spmd
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.output import print_json
from rlhf_spmd.files.reading import is_folder


def run(parsed: argparse.Namespace) -> int:
    """Writes the examples -> the exit status. Raises UserError."""
    return write("examples", parsed)


def write(name: str, parsed: argparse.Namespace) -> int:
    """Writes a folder of the package to one that is not there yet. Raises UserError if it is."""
    if is_folder(parsed.folder):
        raise UserError(f"{parsed.folder} exists already; name another folder")
    bases = (Path(base, name) for base in rlhf_spmd.__path__)  # of the wheel, or the checkout
    source = next(path for path in bases if path.is_dir())
    shutil.copytree(source, parsed.folder, ignore=shutil.ignore_patterns("__*"), copy_function=shutil.copyfile)
    for path in parsed.folder.glob("*.sh"):
        path.chmod(0o755)
    print(f"The files are in {parsed.folder}")
    print_json({"out": str(parsed.folder), "ok": True}, parsed.json)
    return 0
