"""The rules for files: which texts name one, and how text is written and read.

Text is UTF-8 whatever the locale, and lines end at "\\n" only: U+0085, U+2028 and their like are text.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

# In JSON: half a surrogate pair, which UTF-8 does not have, and what other readers take for the end of a line.
ESCAPED = re.compile("[\x85\u2028\u2029\ud800-\udfff]")


def is_file(path: str | Path) -> bool:
    """Whether a text names a file. It need not be a path: it may be too long for one, or hold NUL."""
    return not why_no_file(path)


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
        return "is a folder" if Path(path).is_dir() else f"does not exist (looked in {Path.cwd()})"
    except OSError as error:
        return f"can't be read: {error.strerror or error}"
    except ValueError as error:  # a NUL, or half a surrogate pair
        return f"is no path: {error}"


def read_lines(path: Path) -> list[str]:
    """The lines of a file without their ends; none if there is no file. Bytes that are no UTF-8 are replaced."""
    if not path.is_file():
        return []
    lines = path.read_bytes().decode(errors="replace").split("\n")
    return lines if lines[-1] else lines[:-1]


def json_lines(rows: Iterable[object]) -> str:
    """A line of JSON for each row."""
    return "".join(json_text(row) + "\n" for row in rows)


def json_text(value: object, indent: int | None = None) -> str:
    """A value as JSON that can be written as UTF-8: half of a surrogate pair is escaped. Values that JSON has no type
    for are written as their texts."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    return ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)  # such characters stand inside texts only
