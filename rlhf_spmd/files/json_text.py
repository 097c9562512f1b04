"""JSON as text: strict reading, and writing that any reader takes."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_spmd.files.reading import read_bytes, read_lines

# In JSON: half a surrogate pair, which UTF-8 does not have, and what other readers take for the end of a line.
ESCAPED = re.compile("[\x85\u2028\u2029\ud800-\udfff]")


def json_value(text: str | bytes, *, any_size: bool = False) -> Any:
    """Returns what JSON says. Raises ValueError also where json has other errors, or where users of the value would:
    for what is nested too deep, and for whole numbers beyond the largest float, unless they may have any size."""
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
    """Returns the object in a file of JSON; an empty one if there is no file, or no object in it. Raises as
    read_bytes."""
    try:
        value = json_value(read_bytes(path))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def numbered_values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields number and value of each line of a file of JSON; None for a line that is not JSON, such as half of the
    last line of a process that was killed. Raises as read_bytes."""
    for number, line in enumerate(read_lines(path), start=1):
        try:
            yield number, json_value(line)
        except ValueError:
            yield number, None


def finite(value: Any) -> Any:
    """Returns a value with None in the place of NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_lines(rows: Iterable[object]) -> str:
    """Returns a line of JSON for each row."""
    return "".join(json_text(row) + "\n" for row in rows)


def json_text(value: object, indent: int | None = None) -> str:
    """Returns a value as JSON that can be written as UTF-8: half of a surrogate pair is escaped. Values that JSON has
    no type for are written as their texts."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    return ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)  # such characters stand inside texts only
