"""Files that subcommands write: not over others, and with the reason where it fails."""

import argparse
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
    """Writes an output file, and its folder if need be. Raises UserError if that fails or matplotlib is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}; name another file") from None
    except ImportError as error:
        raise UserError(f"a picture needs matplotlib ({error}): pip install matplotlib") from None


def check_out(parsed: argparse.Namespace) -> Path:
    """Returns the file of the picture. Raises UserError if it is not a picture or would replace a file."""
    out = Path(parsed.out)
    if out.suffix.lower() != ".png":
        raise UserError(f"--out {parsed.out} is not the name of a picture: give it the ending .png")
    refuse_existing(parsed, out)
    return out
