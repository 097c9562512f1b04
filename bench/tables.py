"""Writes the tables of PAGES, between `<!-- rows: NAME -->` and `<!-- end -->`, from rows of clean commits.

A table shows the rows of a file (columns.toml), or quotes numbers of several files (quotes.toml).

Cost: none. Command: python -m bench tables. A unit test fails when a table and its rows differ.
"""

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.columns import COLUMNS, JOINED, JOINS, Columns, Rows, joined, quoted, table
from bench.rows import REPOSITORY, Arguments

PAGES = tuple(REPOSITORY / name for name in ("README.md", "bench/RESULTS.md", "docs/recipes.md", "docs/papers.md"))
LEFT = 3  # columns of a table in a terminal that start at the left: names
BLOCK = re.compile(r"<!-- rows: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
JOIN = ("file", "where", "by", "across")  # of a quote: the rows that its format strings are about
QUOTES = tomllib.loads((Path(__file__).parent / "quotes.toml").read_text(encoding="utf-8"))


def main(arguments: list[str]) -> int:
    Arguments("tables", __doc__, writes=False).parse_args(arguments)
    for page in PAGES:
        page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")
    return finished("tables", ok=True)


def render(text: str) -> str:
    """Rewrites every block of a text from its rows."""
    return BLOCK.sub(lambda found: f"<!-- rows: {found[1]} -->\n{_block(found[1])}\n<!-- end -->", text)


def _block(name: str) -> str:
    if name in QUOTES:
        columns = COLUMNS["evidence" if name == "evidence" else "papers"]
        return "\n".join(markdown(columns, [quote(entry) for entry in QUOTES[name]]))
    columns, shown, rows = table(name)
    return "\n".join([*markdown(columns, shown), "", about(rows)])


def quote(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns an entry of quotes.toml with the numbers in its claim, in what is ours and in its verdict."""
    join = {name: entry[name] for name in JOIN if name in entry}
    if not join:
        return entry
    texts = {name: quoted(entry[name], **join) for name in ("claim", "ours", "verdict") if name in entry}
    return entry | texts


def about(rows: Rows) -> str:
    """Says when, at which commits and on which machines rows were measured."""
    machines: dict[tuple[str, str, str], dict[str, None]] = {}
    for row in rows:
        versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
        machines.setdefault((row["date"], row["hardware"], versions), {})[row["commit"]] = None
    texts = []
    for (date, hardware, versions), commits in machines.items():
        texts.append(f"{date}, commit{'s' * (len(commits) > 1)} {', '.join(commits)}, {hardware}, {versions}")
    return "; ".join(texts) + "."


def markdown(columns: Columns, rows: Rows) -> list[str]:
    """Returns a table's lines."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]


def ended(bench: str, rows: Sequence[dict], *, ok: bool | None = None, **told: Any) -> int:
    """Ends a bench: prints its rows and the JSON line. Returns the exit status.

    ok: None: that of all rows.
    """
    print(text_table(bench.replace("-", "_"), rows))
    ok = all(row["ok"] for row in rows) if ok is None else ok
    return finished(bench, **told, ok=ok)


def finished(bench: str, **told: Any) -> int:
    """Ends a bench with its JSON line. Returns the exit status, by `ok`."""
    print(json.dumps({"bench": bench, **told}))
    return 0 if told["ok"] else 1


def text_table(name: str, rows: Sequence[dict]) -> str:
    """Formats the rows for a terminal, in columns; the first and the last ones start at the left."""
    columns = COLUMNS.get(name)
    if columns is None:
        columns, rows = JOINED[name], joined(rows, **{"by": ()} | JOINS.get(name, {}))
    cells = [list(columns), *([cell(row).replace("`", "") for cell in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    last = len(widths) - 1
    return "\n".join(
        "  ".join(
            cell if at == last else cell.ljust(width) if at < LEFT else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )
