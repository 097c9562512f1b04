"""Writes docs/metrics.md: the metrics of each algorithm that comes with the package. Their meaning is the comment at
the metric in METRICS of the algorithm's page, or of the module from which the page takes it.

Cost: none. Command: python -m tools pages. A unit test fails when the page is not current.
"""

import re
from dataclasses import asdict

from bench.rows import REPOSITORY
from bench.tables import Columns
from rlhf_spmd.algorithms.page import Metric
from rlhf_spmd.pages.algorithm import algorithm_names, load_algorithm

PAGE = REPOSITORY / "docs" / "metrics.md"
HEAD = """# Metrics of the algorithms

<!-- `python -m tools pages` writes this page from the code; do not edit it. -->

The names are those of `metrics.jsonl`. Metrics that every algorithm has are in [Run
folder](run_folder.md#metrics). *Console* is the title of the metric's column. *Normal* is the range outside
which a run warns.
"""
TABLE = "\n| metric | meaning | console | normal |\n|---|---|---|---|\n"
ENTRY = re.compile(r'^(?:    |METRICS\[)"(\w+)"(?::|\] =) Metric\(.*?(?:  # (.*))?$')


def page() -> str:
    """Returns the page in Markdown."""
    folder = REPOSITORY / "rlhf_spmd" / "algorithms"
    meanings = {path.stem: meanings_in(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.py"))}
    everywhere = {name: text for found in meanings.values() for name, text in found.items() if text}
    parts = [HEAD]
    for name in algorithm_names():
        algorithm = load_algorithm(name)
        rows = [
            f"| `{key}` | {meanings.get(name, {}).get(key) or everywhere.get(key, '')} | {metric.column} "
            f"| {normal(metric)} |\n"
            for key, metric in algorithm.metrics.items()
        ]
        parts += [f"\n## {name}\n{TABLE}", *rows]
    return "".join(parts)


def variants(name: str) -> tuple[Columns, list[dict]]:
    """Returns the columns and rows of a table of the methods that options make of a page."""
    columns: Columns = {
        "method": lambda row: row["name"],
        f"options, each with `{name}.` before it": lambda row: f"`{row['words']}`" if row["words"] else "none",
        "what differs": lambda row: row["formula"],
        "source": lambda row: f"arXiv {row['source']}" if row["source"][0].isdigit() else row["source"],
    }
    return columns, [asdict(one) for one in load_algorithm(name).module.VARIANTS]


def normal(metric: Metric) -> str:
    """Returns the range in which a metric causes no warning, as text; empty: it never does."""
    if metric.limits is None:
        return ""
    return f"{metric.limits[0]:g} to {metric.limits[1]:g}"


def meanings_in(source: str) -> dict[str, str]:
    """Returns the comment at each metric of a module: at the end of its line, or on the lines above it."""
    found, above = {}, []
    for line in source.split("\n"):
        entry = ENTRY.match(line)
        if entry:
            found[entry[1]] = entry[2] or " ".join(above)
        above = [*above, line.strip("# ")] if line.startswith("    # ") else []
    return found
