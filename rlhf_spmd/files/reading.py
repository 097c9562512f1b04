"""Which texts name a file, and how files are read.

Text is UTF-8 whatever the locale, and lines end at "\\n" only: U+0085, U+2028 and their like are text.
"""

import hashlib
import os
import stat
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from rlhf_spmd.errors import UserError

NO_RIGHT = "can't be read: Permission denied: ask its owner for the rights (chmod g+rX)"
NO_FILE = "is a pipe, a socket or a device, not a file"
LARGEST = 4 << 30  # bytes of a file that is read as a whole: more, e.g. a hole of a terabyte, may not fit in memory
PIECE_BYTES, NUM_PIECES = 2**16, 256  # of a file, for its fingerprint
OPEN_FILES = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # a pipe with one of these names has its writer


def is_file(path: str | Path) -> bool:
    """Returns whether a text names a file. It need not be a path: it may be too long for one, or hold NUL."""
    return not why_no_file(path)


def is_folder(path: str | Path) -> bool:
    """Returns whether a text, which need not be a path, names a folder."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def why_no_file(path: str | Path) -> str:
    """Returns why a text names no file that can be opened, to follow its name; empty if it does."""
    try:
        if Path(path).is_file():
            return ""
        if Path(path).is_dir():
            return "is a folder"
        return NO_FILE if Path(path).exists() else f"does not exist (looked in {Path.cwd()})"
    except PermissionError:
        return NO_RIGHT
    except OSError as error:
        return f"can't be read: {error.strerror or error}"
    except ValueError as error:  # a NUL, or half a surrogate pair
        return f"is not a path: {error}"


def read_bytes(path: str | Path) -> bytes:
    """Returns the content of a file. Raises OSError, which names the file, and UserError for a pipe or the like, which
    would be waited for, and for what is too large or does not fit in memory."""
    status = os.stat(path)
    mode = status.st_mode
    is_open = stat.S_ISFIFO(mode) and str(path).startswith(OPEN_FILES)
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or is_open):
        raise UserError(f"{path} {NO_FILE}: put a file there, or name another one")
    if status.st_size > LARGEST:
        raise UserError(f"{path} has {status.st_size / 2**30:,.1f} GiB, and at most {LARGEST >> 30} are read")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        error.filename = error.filename or str(path)  # that of a failed read names none
        raise
    except MemoryError:
        raise no_memory(path) from None


def no_memory(path: str | Path) -> UserError:
    """Returns the error for a file that does not fit in the memory of this process."""
    return UserError(
        f"{path} does not fit in memory ({os.stat(path).st_size / 2**30:,.1f} GiB): name a smaller file, or raise the "
        "limit (`ulimit -v`, the job's control group)"
    )


def refuse_pipes(folder: Path) -> None:
    """Raises UserError for a pipe or the like in a folder that other packages read: they would wait for it."""
    for path in paths_in(folder, "*"):
        if why_no_file(path) == NO_FILE:
            raise UserError(f"{path} {NO_FILE}; put the file there")


def fingerprint(paths: Iterable[Path]) -> str:
    """Returns a hash of files: their names and sizes, and pieces of them at distances shorter than a layer of a model,
    so that it takes milliseconds."""
    digest = hashlib.sha256()
    for path in paths:
        num_bytes = path.stat().st_size
        digest.update(f"{path.name} {num_bytes} ".encode())
        with path.open("rb") as file:
            starts = range(0, num_bytes, max(PIECE_BYTES, num_bytes // NUM_PIECES))
            for start in (*starts, max(0, num_bytes - PIECE_BYTES)):
                file.seek(start)
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()


def read_lines(path: Path) -> list[str]:
    """Returns the lines of a file without their ends; none if there is no file. Bytes that are not UTF-8 are replaced.
    Raises as read_bytes."""
    try:
        lines = read_bytes(path).decode(errors="replace").split("\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    return lines if lines[-1] else lines[:-1]


def paths_in(folder: Path, pattern: str) -> list[Path]:
    """Returns the paths in a folder whose names match a pattern, in order; none if there is no folder. Raises OSError
    if it can't be read, where Path.glob finds none."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(names) if fnmatchcase(name, pattern)]
