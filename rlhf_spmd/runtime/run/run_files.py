"""Reads the files of a run folder, also while the run goes on or after it was killed. No torch, no MPI."""

import json
from pathlib import Path
from typing import Any

from rlhf_spmd.algorithm import Algorithm, load_algorithm
from rlhf_spmd.errors import UserError
from rlhf_spmd.files import read_lines
from rlhf_spmd.runtime.run.run_folder import CONFIG

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The objects of a file of lines, without those that are cut; none if there is no file."""
    rows = []
    for line in read_lines(path):
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a killed run may be cut
            continue
        rows += [row] if isinstance(row, dict) else []
    return rows


def read_config(run: Path) -> Row:
    """The options of a run; none if they are not there or are no JSON."""
    try:
        found = json.loads((run / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def algorithm_of(run: Path, config: Row) -> Algorithm | None:
    """The algorithm of a run; None if its page can't be read any more."""
    page = run / "algorithm.py"
    try:
        return load_algorithm(str(page) if page.is_file() else str(config.get("algorithm", "ppo")))
    except UserError:
        return None
