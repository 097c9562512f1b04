"""Reads the files of a run folder, also while the run goes on or after it was killed. No torch, no MPI.

Everything in the folder is data here: no page, strategy or reward function that it holds or names is loaded, and values
of any type and size are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_spmd.algorithms.page import Metric
from rlhf_spmd.files.json_text import json_object, numbered_values
from rlhf_spmd.runtime.records.run_folder import CONFIG

PROGRAM = "program.json"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reported:
    """What is known of a run without its code.

    headlines: the metrics that its algorithm reports at the end.
    made_with: commit, versions, hardware and the like of its last start, by name.
    """

    strategy: str
    title: str  # of the algorithm
    headlines: tuple[str, ...]
    made_with: Mapping[str, str] = field(default_factory=dict)


def read_rows(path: Path) -> list[Row]:
    """Returns the objects of a file of lines, without those that are cut; none if there is no file. Raises OSError and
    UserError if it can't be read."""
    return [row for _, row in numbered_values(path) if isinstance(row, dict)]


def read_config(folder: Path) -> Row:
    """Reads the options of a run; none if they are not there or not JSON. Raises OSError and UserError."""
    return json_object(folder / CONFIG)


def reported(folder: Path, config: Row) -> Reported:
    """Returns what a run wrote of its algorithm and strategy. Raises OSError and UserError."""
    about, name = json_object(folder / PROGRAM), config.get("algorithm", "ppo")
    strategy, title, headlines = (about.get(key) for key in ("strategy", "algorithm", "headlines"))
    strategy, made_with = strategy if isinstance(strategy, str) else "", _made_with(about)
    if isinstance(title, str) and isinstance(headlines, list):
        return Reported(strategy, title, tuple(name for name in headlines if isinstance(name, str)), made_with)
    return Reported(strategy, str(name), (), made_with)


def _made_with(about: Row) -> dict[str, str]:
    software = about.get("software")
    known = {"ranks": about.get("ranks"), "hardware": about.get("hardware"), "started": about.get("started")}
    known |= software if isinstance(software, dict) else {}
    return {name: str(value) for name, value in known.items() if isinstance(value, str | int)}


def headlines_of(metrics: Mapping[str, Metric]) -> tuple[str, ...]:
    """Returns the metrics that an algorithm reports at the end of a run."""
    return tuple(name for name, metric in metrics.items() if metric.headline is not None)
