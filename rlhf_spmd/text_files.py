"""The one rule for text files: UTF-8 whatever the locale, and lines that end at "\\n" only."""

import json
import re
from pathlib import Path

# What a text may hold, and what UTF-8, or readers that end lines at more than "\n", can't take as it is.
ESCAPED = re.compile("[\x85\u2028\u2029\ud800-\udfff]")


def read_lines(path: Path) -> list[str]:
    """The lines of a file without their ends; none if there is no file. Bytes that are no UTF-8 are replaced."""
    if not path.is_file():
        return []
    lines = path.read_bytes().decode(errors="replace").split("\n")
    return lines[:-1] if not lines[-1] else lines


def json_text(value: object, indent: int | None = None) -> str:
    """A value as JSON that every reader can take: what is no text for UTF-8, such as half a surrogate pair, is escaped.
    Values that JSON has no type for are written as their texts."""
    return escaped(json.dumps(value, ensure_ascii=False, indent=indent, default=str))


def escaped(text: str) -> str:
    """JSON in which such characters, which may only stand inside its texts, are escaped."""
    return ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
