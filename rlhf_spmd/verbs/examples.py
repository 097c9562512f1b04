"""The examples subcommand: writes the files of options that come with the package, with their data and a notebook."""

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path

import rlhf_spmd
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.output import print_json
from rlhf_spmd.files.reading import is_folder

LEFT_OUT = ("__*", "test.sbatch", "bench.sbatch", "measure.sh")  # scripts that need the checkout


def run(parsed: argparse.Namespace) -> int:
    """Writes the examples, whose paths begin with the folder that is given -> the exit status. Raises UserError."""
    embedded = Path(rlhf_spmd.__file__).parent / "embedded"
    return write("examples", parsed, {"examples/": f"{parsed.folder}/", "rlhf_spmd/embedded": str(embedded)})


def write(name: str, parsed: argparse.Namespace, texts: Mapping[str, str], note: str = "") -> int:
    """Writes a folder of the package to one that is not there yet. Raises UserError if it is.

    texts: text in files -> its replacement.
    note: what to do next.
    """
    if is_folder(parsed.folder):
        raise UserError(f"{parsed.folder} exists already; name another folder")
    bases = (Path(base, name) for base in rlhf_spmd.__path__)  # of the wheel, or the checkout
    source = next(path for path in bases if path.is_dir())
    shutil.copytree(source, parsed.folder, ignore=shutil.ignore_patterns(*LEFT_OUT), copy_function=shutil.copyfile)
    for path in parsed.folder.glob("*.*"):
        text = path.read_text(encoding="utf-8")
        for old, new in texts.items():
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".sh":
            path.chmod(0o755)
    print(f"The files are in {parsed.folder}{note}")
    print_json({"out": str(parsed.folder), "ok": True}, parsed.json)
    return 0
