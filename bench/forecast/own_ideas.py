"""What `bench scan` adds for one's own ideas: strategy files beside the shipped ones, another preset or layout,
options, and rows as CSV. None of it is written to bench/results/."""

import argparse
import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.baseline_tables import BASELINES
from bench.forecast.suites import GRIDS, HALVES, STAGES, TUNED, Case, cases, stages
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.strategy import Strategy, load_strategy

OF_STRATEGY = "strategy."  # the beginning of a word that is for the strategies of --strategy alone
USUAL = {"tp": HALVES, "pp": HALVES, "inference_pp": HALVES[:3], "generation_pp": HALVES[:3], **GRIDS["reallocation"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    parser.add_argument("--preset", help="instead of those of the suite")
    parser.add_argument("--layout", metavar="NxG", help="instead of those of the suite")
    text = "instead of those of the suite; sft, reward_model and dpo: their part of the suite stages"
    parser.add_argument("--algorithm", metavar="NAME|FILE.py", help=text)
    parser.add_argument(
        "--strategy", action="append", default=[], metavar="NAME|FILE.py", help="beside the shipped ones"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE.csv", help="write the rows; replaces the file")
    text = "options, e.g. shape=actor=llama-70b,critic=llama-7b; strategy.NAME=VALUE is for --strategy alone"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=text)


def is_own(parsed: argparse.Namespace) -> bool:
    """Tells whether the rows are not those of a suite."""
    return bool(parsed.preset or parsed.layout or parsed.algorithm or parsed.strategy or parsed.overrides)


def own_cases(of_suite: Sequence[Case], parsed: argparse.Namespace) -> tuple[Case, ...]:
    """Returns the cases of a suite with the given algorithm, preset and layout, and in every place also the strategies
    of --strategy. Raises UserError for a strategy that does not exist, an option that it does not have, and a file that
    cannot be written."""
    if parsed.csv and not parsed.csv.parent.is_dir():
        raise UserError(f"{parsed.csv} can't be written: there is no such folder; name another file")
    found = list(of_suite)
    if parsed.algorithm:
        first = [replace(case, algorithm=parsed.algorithm) for case in found if case.algorithm == found[0].algorithm]
        found = [case for case in found if case.algorithm == parsed.algorithm] or first
    if parsed.preset or parsed.layout:
        found = _elsewhere(found, parsed.preset, parsed.layout)
    words = [word.removeprefix(OF_STRATEGY) for word in parsed.overrides if word.startswith(OF_STRATEGY)]
    if words and not parsed.strategy:
        raise UserError(f"{OF_STRATEGY}{words[0]}: the options of the shipped strategies are searched; give --strategy")
    options = dict(word.split("=", 1) for word in words)
    places = dict.fromkeys((case.preset, case.layout, case.algorithm, case.overrides) for case in found)
    for name in parsed.strategy:
        typed = load_strategy(name).typed(options)
        for preset, layout, algorithm, overrides in places:
            found.append(Case(preset, layout, name, typed, algorithm=algorithm, overrides=overrides))
    return tuple(found)


def _elsewhere(of_suite: Sequence[Case], preset: str | None, layout: str | None) -> list[Case]:
    """Returns all strategies, and the other systems of these cases, for another preset or on another layout."""
    presets = [preset] if preset else list(dict.fromkeys(case.preset for case in of_suite))
    layouts = [layout] if layout else list(dict.fromkeys(case.layout for case in of_suite))
    kinds = TUNED | {case.strategy: {} for case in of_suite if case.strategy in BASELINES}
    found: list[Case] = []
    for name in dict.fromkeys(case.algorithm for case in of_suite):
        found += stages([name], presets, layouts) if name in STAGES else cases(presets, layouts, kinds, algorithm=name)
    return found


def own_grid(strategy: Strategy) -> dict[str, tuple]:
    """Returns the grid of a strategy of one's own: those of its options that have usual names."""
    return {name: USUAL[name] for name in strategy.parameters if name in USUAL}


def workload_words(overrides: Iterable[str]) -> list[str]:
    """Returns the overrides that are not for strategies."""
    return [word for word in overrides if not word.startswith(OF_STRATEGY)]


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows with the union of their columns; parts of a column that is a mapping have columns of their own, but
    for the options, which are words. Raises UserError if the file cannot be written."""
    flat = [dict(_cells(row)) for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(flat)
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}; name another file") from None


def _cells(row: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in row.items():
        if name == "options":
            yield name, "; ".join(f"{option}={one}" for option, one in value.items())
        elif isinstance(value, Mapping):
            yield from ((f"{name.removesuffix('_s')}_{part}_s", one) for part, one in value.items())
        else:
            yield name, value
