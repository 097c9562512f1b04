"""The rules for files: which texts name one, how text and JSON are written and read, and how foreign text is printed.

Text is UTF-8 whatever the locale, and lines end at "\\n" only: U+0085, U+2028 and their like are text.
"""

import json
import os
import re
import stat
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError

# In JSON: half a surrogate pair, which UTF-8 does not have, and what other readers take for the end of a line.
ESCAPED = re.compile("[\x85\u2028\u2029\ud800-\udfff]")
# What moves a cursor, gives orders to a terminal, or turns the direction of a line; not line feeds and tabs.
CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
NO_RIGHT = "can't be read: Permission denied: ask its owner for the rights (chmod g+rX)"
NO_FILE = "is a pipe, a socket or a device, not a file"
LARGEST = 4 << 30  # bytes of a file that is read as a whole: more, e.g. a hole of a terabyte, may not fit in memory
OPEN_FILES = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # a pipe with one of these names has its writer


def is_file(path: str | Path) -> bool:
    """Whether a text names a file. It need not be a path: it may be too long for one, or hold NUL."""
    return not why_no_file(path)


def user_cache(kind: str) -> Path | None:
    """The user's folder for what this program finds out once; None without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return cache / "rlhf_spmd" / kind


def is_folder(path: str | Path) -> bool:
    """Whether a text, which need not be a path, names a folder."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def why_no_file(path: str | Path) -> str:
    """Why a text names no file that can be opened, to follow its name; empty if it does."""
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
        return f"is no path: {error}"


def read_bytes(path: str | Path) -> bytes:
    """The content of a file. Raises OSError, which names the file, and UserError for a pipe or the like, which would be
    waited for, and for what is too large or does not fit in memory."""
    found = os.stat(path)
    mode = found.st_mode
    is_open = stat.S_ISFIFO(mode) and str(path).startswith(OPEN_FILES)
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or is_open):
        raise UserError(f"{path} {NO_FILE}: put a file there, or name another one")
    if found.st_size > LARGEST:
        raise UserError(f"{path} has {found.st_size / 2**30:,.1f} GiB, and at most {LARGEST >> 30} are read")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        error.filename = error.filename or str(path)  # that of a failed read names none
        raise
    except MemoryError:
        raise no_memory(path) from None


def no_memory(path: str | Path) -> UserError:
    """The error for a file that does not fit in the memory of this process."""
    return UserError(
        f"{path} does not fit in memory ({os.stat(path).st_size / 2**30:,.1f} GiB): name a smaller file, or raise the "
        "limit (`ulimit -v`, the job's control group)"
    )


def refuse_pipes(folder: Path) -> None:
    """Raises UserError for a pipe or the like in a folder that other packages read: they would wait for it."""
    for path in paths_in(folder, "*"):
        if why_no_file(path) == NO_FILE:
            raise UserError(f"{path} {NO_FILE}; put the file there")


def read_lines(path: Path) -> list[str]:
    """The lines of a file without their ends; none if there is no file. Bytes that are no UTF-8 are replaced. Raises as
    read_bytes."""
    try:
        lines = read_bytes(path).decode(errors="replace").split("\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    return lines if lines[-1] else lines[:-1]


def paths_in(folder: Path, pattern: str) -> list[Path]:
    """The paths in a folder whose names match a pattern, in order; none if there is no folder. Raises OSError if it
    can't be read, where Path.glob finds none."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(names) if fnmatchcase(name, pattern)]


def json_value(text: str | bytes, *, any_size: bool = False) -> Any:
    """What JSON says. Raises ValueError also where json has other errors, or where users of the value would: for what
    is nested too deep, and for whole numbers beyond the largest float, unless they may have any size."""
    try:
        return json.loads(text, parse_int=int if any_size else _whole)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _whole(digits: str) -> int:
    number = int(digits)
    try:
        float(number)
    except OverflowError:
        raise ValueError("a whole number is too large") from None
    return number


def json_object(path: Path) -> dict[str, Any]:
    """The object in a file of JSON; an empty one if there is no file, or no object in it. Raises as read_bytes."""
    try:
        found = json_value(read_bytes(path))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def printable(text: str) -> str:
    """Text that can't give orders to a terminal: control characters are escapes; line feeds and tabs stay."""
    return CONTROLS.sub(lambda found: _escape(found[0]), text)


def on_one_line(text: str) -> str:
    """Text with escapes for all that is not printed as itself, line breaks included."""
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode()


def json_lines(rows: Iterable[object]) -> str:
    """A line of JSON for each row."""
    return "".join(json_text(row) + "\n" for row in rows)


def json_text(value: object, indent: int | None = None) -> str:
    """A value as JSON that can be written as UTF-8: half of a surrogate pair is escaped. Values that JSON has no type
    for are written as their texts."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    return ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)  # such characters stand inside texts only
