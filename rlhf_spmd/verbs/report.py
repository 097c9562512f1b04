"""The report subcommand: one page of HTML with the curves and samples of some runs.

One process; needs neither torch nor MPI.
"""

import argparse
from pathlib import Path

from rlhf_spmd.command_line.outputs import check_out, save
from rlhf_spmd.files.output import print_json
from rlhf_spmd.runtime.records.web_page import page, read


def run(parsed: argparse.Namespace) -> int:
    """Writes the page and prints a line of JSON -> the exit status. Raises UserError."""
    out = check_out(parsed, ".html", ".htm")
    folders = {Path(name).resolve(): Path(name) for name in parsed.runs}  # each once
    runs = [read(folder) for folder in folders.values()]
    title = parsed.title or ("Run " if len(runs) == 1 else "Runs ") + ", ".join(run.name for run in runs)
    save(out, lambda path: path.write_text(page(runs, title), encoding="utf-8", errors="backslashreplace"))
    print(f"{out}: {len(runs)} run{'s' * (len(runs) > 1)}, {out.stat().st_size / 1e3:,.0f} kB")
    print_json({"out": str(out), "runs": [str(run.path) for run in runs], "ok": True}, parsed.json)
    return 0
