"""All rows and pictures of bench/results/ on one page, report.html, that needs nothing else: no script, no network.

Cost: none. Command: python -m bench report
"""

import argparse
import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from bench.columns import COLUMNS
from bench.rows import RESULTS, read_rows

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2129; max-width: 1200px; margin: 2em auto; padding: 0 1em }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2.5em; border-bottom: 1px solid #d8dbe0 }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto }
th, td { padding: 3px 9px; border-bottom: 1px solid #e6e8ec; text-align: left; vertical-align: top }
th { background: #f4f5f7 } img { max-width: 100% } .about { color: #6b7280; font-size: 13px }
nav a { margin-right: 1em }
"""
ABOUT = ("date", "commit", "hardware", "python", "versions")  # what bench/rows.py adds to each row


def page(folder: Path) -> str:
    """The report of a folder of results, as HTML: a section per file, those of one name together."""
    names = sorted({path.stem for path in folder.iterdir() if path.suffix in (".jsonl", ".png")})
    links = " ".join(f'<a href="#{escape(name)}">{escape(name)}</a>' for name in names)
    sections = "\n".join(section(folder, name) for name in names)
    head = f"<meta charset='utf-8'><title>rlhf_spmd: results</title><style>{STYLE}</style>"
    body = f"<h1>Results</h1><nav>{links}</nav>{sections}"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>"


def section(folder: Path, name: str) -> str:
    """The table of NAME.jsonl and the picture NAME.png, whichever there are."""
    parts = [f'<h2 id="{escape(name)}">{escape(name)}</h2>']
    rows_file, picture = folder / f"{name}.jsonl", folder / f"{name}.png"
    if rows_file.exists():
        parts.append(table(name, read_rows(rows_file)))
    if picture.exists():
        data = base64.b64encode(picture.read_bytes()).decode()
        parts.append(f'<img alt="{escape(name)}" src="data:image/png;base64,{data}">')
    return f"<section>{''.join(parts)}</section>"


def table(name: str, rows: Sequence[Mapping]) -> str:
    """Rows in the columns that README.md shows of them; all plain values of files that have no such columns."""
    if not rows:
        return "<p>no rows</p>"
    columns = COLUMNS.get(name)
    if columns is None:
        keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in ABOUT]
        columns = {key: lambda row, key=key: plain(row.get(key)) for key in keys}
    lines = ["".join(f"<th>{escape(title)}</th>" for title in columns)]
    cells = [[cell(row).strip("`") for cell in columns.values()] for row in rows]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in sorted(cells, key=natural)]
    about = rows[0]
    source = ", ".join(str(about[key]) for key in ("date", "commit", "hardware") if about.get(key))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<p class="about">{escape(source)}</p><table>{body}</table>'


def natural(cells: Sequence[str]) -> list[tuple]:
    """The order of rows: by the cells from left to right, numbers by their size and before words."""
    found = []
    for cell in cells:
        try:
            found.append((0, float(cell.replace(",", "")), ""))
        except ValueError:
            found.append((1, 0.0, cell))
    return found


def plain(value: object) -> str:
    """A value of a row as text; numbers short."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def main(arguments: list[str]) -> int:
    argparse.ArgumentParser(prog="bench report", description=__doc__.partition("\n")[0]).parse_args(arguments)
    path = RESULTS / "report.html"
    path.write_text(page(RESULTS), encoding="utf-8")
    print(f"{path}, {path.stat().st_size / 1e6:.1f} MB")
    print(json.dumps({"bench": "report", "file": str(path), "ok": True}))
    return 0
