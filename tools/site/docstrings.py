"""How the reference shows docstrings: `name: meaning` at the beginning of a line is an item of a list."""

import re
from typing import Any

from griffe import Extension, Object

FIELD = re.compile(r"^(\w+(?:, \w+)*): (?=\S)")


class Fields(Extension):
    """Rewrites the docstring of each object before it becomes HTML."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_fields(obj.docstring.value)


def with_fields(text: str) -> str:
    """Returns the text with its fields as items, each with the lines that continue it."""
    out, is_item = [], False
    for line in text.split("\n"):
        field = FIELD.match(line)
        if field and not is_item and out and out[-1]:
            out.append("")
        is_item = bool(field) or (is_item and bool(line))
        out.append(f"- `{field[1]}`: {line[field.end() :]}" if field else f"    {line}" if is_item else line)
    return "\n".join(out)
