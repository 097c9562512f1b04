"""Files that subcommands write: not over others, and with the reason where it fails."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import is_file, is_folder


def refuse_existing(parsed: argparse.Namespace, *paths: Path) -> None:
    """Raises UserError for an output file that exists, unless --overwrite is given."""
    for path in paths:
        if (is_file(path) or is_folder(path)) and not parsed.overwrite:
            raise UserError(f"{path} exists already; pass --overwrite, or name another file")


def save(path: Path, write: Callable[[Path], object]) -> None:
    """Writes an output file, and its folder if need be. Raises UserError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}; name another file") from None


def check_out(parsed: argparse.Namespace, *endings: str) -> Path:
    """Returns the file of --out. Raises UserError if it has none of these endings, would replace a file or cannot be
    written."""
    out = Path(parsed.out)
    if out.suffix.lower() not in endings:
        raise UserError(f"--out {parsed.out} is a file of another kind: give it the ending {' or '.join(endings)}")
    refuse_existing(parsed, out)
    folder = next(folder for folder in out.absolute().parents if is_folder(folder))
    if not os.access(folder, os.W_OK):
        raise UserError(f"--out {parsed.out}: {folder} cannot be written; name a file in another folder")
    return out
