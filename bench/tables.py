"""Writes the tables of PAGES, between `<!-- rows: NAME -->` and `<!-- end -->`, from rows of clean commits.

Cost: none. Command: python -m bench tables. A unit test fails when a table and its rows differ.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from bench import evidence
from bench.columns import COLUMNS, JOINED, Columns
from bench.rows import REPOSITORY, clean_rows

PAGES = tuple(REPOSITORY / name for name in ("README.md", "bench/RESULTS.md", "docs/recipes.md"))
LEFT = 3  # columns of a table in a terminal that start at the left: names
ABSENT = ("1e0787d", "8a5d435", "dff037d")  # commits of rows whose work entered the history as 87d4212
BLOCK = re.compile(r"<!-- rows: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def main(arguments: list[str]) -> int:
    assert not arguments, "tables takes no options"
    for page in PAGES:
        page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")
    print(json.dumps({"bench": "tables", "ok": True}))
    return 0


def render(text: str) -> str:
    """Rewrites every block of a text from its rows."""
    return BLOCK.sub(lambda found: f"<!-- rows: {found[1]} -->\n{_table(found[1])}\n<!-- end -->", text)


def _table(name: str) -> str:
    if name == "evidence":  # of the rows of several files
        return "\n".join(markdown(*evidence.table()))
    file, joined, columns = JOINED.get(name) or (name, list, COLUMNS[name])
    rows = clean_rows(file)
    lines, about = markdown(columns, joined(rows)), rows[0]
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    commits = list(dict.fromkeys(row["commit"] for row in rows))  # some benches measure a part of their rows
    of = f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}"
    if set(commits) & set(ABSENT):
        of += f" ({' and '.join(one for one in commits if one in ABSENT)}: in the history as a part of 87d4212)"
    return "\n".join([*lines, "", f"{about['date']}, {of}, {about['hardware']}, {versions}."])


def markdown(columns: Columns, rows: Sequence[dict]) -> list[str]:
    """Returns a table's lines."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]


def ended(bench: str, rows: Sequence[dict], *, ok: bool | None = None, **told: Any) -> int:
    """Ends a bench: prints its rows and the JSON line. Returns the exit status.

    ok: None: that of all rows.
    """
    print(text_table(bench.replace("-", "_"), rows))
    ok = all(row["ok"] for row in rows) if ok is None else ok
    print(json.dumps({"bench": bench, **told, "ok": ok}))
    return 0 if ok else 1


def text_table(name: str, rows: Sequence[dict]) -> str:
    """Formats the rows for a terminal, in columns; the first and the last ones start at the left."""
    cells = [list(COLUMNS[name]), *([cell(row).replace("`", "") for cell in COLUMNS[name].values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    last = len(widths) - 1
    return "\n".join(
        "  ".join(
            cell if at == last else cell.ljust(width) if at < LEFT else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )
