"""An episode by turns, for people: who said what, and why it ended."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_spmd.files.printing import printable

LABELS = {"model": "model", "calls": "call", "answers": "answer"}
INDENT = 10  # columns before what was said


def episode_text(turns: Sequence[Mapping[str, Any]], reason: str, width: int = 80) -> str:
    """Returns an episode as lines of at most `width` columns.

    turns: as in environments/renderer.py.
    reason: why the episode ended; empty: it is not known.
    """
    lines: list[str] = []
    for number, turn in enumerate(turns, start=1):
        before = f"{number:>2} "
        for name, label in LABELS.items():
            found = turn.get(name) or []
            for said in [found] if isinstance(found, str) else found:
                lines += _wrapped(f"{before}{label}", said, width)
                before = "   "
        if before.strip():
            lines += _wrapped(f"{before}model", "(nothing)", width)
    return "\n".join([*lines, *([f"   ended: {reason}"] if reason else [])])


def _wrapped(label: str, text: str, width: int) -> list[str]:
    room = max(20, width - INDENT)
    parts = printable(text).expandtabs(4).split("\n")
    lines = [line for part in parts for line in textwrap.wrap(part, room, replace_whitespace=False) or [""]]
    return [f"{label if not place else '':<{INDENT}}{line}".rstrip() for place, line in enumerate(lines)]
