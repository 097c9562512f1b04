"""What is printed: foreign text (model output, errors, names), and numbers."""

import re
from collections.abc import Sequence

# What moves a cursor, gives orders to a terminal, or turns the direction of a line; not line feeds and tabs.
CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Escapes control characters, so that text can't give orders to a terminal; line feeds and tabs stay."""
    return CONTROLS.sub(lambda match: _escape(match[0]), text)


def on_one_line(text: str) -> str:
    """Returns text with escapes for all that is not printed as itself, line breaks included."""
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def command_lines(words: Sequence[str], columns: int | None, before: int = 0) -> str:
    """Breaks a command into lines for a shell, continued by backslashes, where one would be wider than so many columns
    (None: no limit).

    before: places that are taken in the first line.
    """
    lines, room = [words[0]], float("inf") if columns is None else columns - 2
    for word in words[1:]:
        if before * (len(lines) == 1) + len(lines[-1]) + 1 + len(word) > room:
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)


def formatted(value: float, form: str = "{:.4g}") -> str:
    """Returns a number in a format such as "{:8.4f}", without the sign of what is zero when rounded: no -0.0000."""
    text = form.format(value)
    is_zero = -1.0 < value <= 0.0 and not re.search("[1-9]", text)
    return form.format(0.0) if is_zero else text


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode()
