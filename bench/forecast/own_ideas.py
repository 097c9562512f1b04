"""What `bench scan` adds for one's own ideas: strategy files beside the shipped ones, another preset or layout,
options, and rows as CSV. None of it is written to bench/results/."""

import argparse
import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.forecast.suites import GRIDS, Case
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.strategy import Strategy, load_strategy

OF_STRATEGY = "strategy."  # the beginning of a word that is for the strategies of --strategy alone
HALVES = GRIDS["flattening"]["tp"]
USUAL = {"tp": HALVES, "pp": HALVES, "inference_pp": HALVES[:3], "generation_pp": HALVES[:3], **GRIDS["reallocation"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    parser.add_argument("--preset", help="instead of those of the suite")
    parser.add_argument("--layout", metavar="NxG", help="instead of those of the suite")
    add_machine(parser)
    text = "instead of those of the suite; sft, reward_model and dpo: their part of the suite stages"
    parser.add_argument("--algorithm", metavar="NAME|FILE.py", help=text)
    parser.add_argument(
        "--strategy", action="append", default=[], metavar="NAME|FILE.py", help="beside the shipped ones"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE.csv", help="write the rows; replaces the file")
    text = "options, e.g. shape=actor=llama-70b,critic=llama-7b; strategy.NAME=VALUE is for --strategy alone"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=text)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose the constants of the devices."""
    machine = parser.add_mutually_exclusive_group()
    text = "constants of the devices, e.g. h100-80g-derived, mine.json, or of two types a,b; +NETWORK between nodes"
    machine.add_argument("--calibration", metavar="NAME|FILE.json", help=text)
    machine.add_argument("--device-type", metavar="TYPE", help="the constants that are derived for it, e.g. h100-80g")


def calibration_of(parsed: argparse.Namespace, usual: str | None = None) -> str | None:
    """Returns the calibration that is asked for, else the usual one."""
    return f"{parsed.device_type}-derived" if parsed.device_type else parsed.calibration or usual


def is_own(parsed: argparse.Namespace) -> bool:
    """Tells whether the rows are not those of a suite."""
    places = parsed.preset or parsed.layout or calibration_of(parsed)
    return bool(places or parsed.algorithm or parsed.strategy or parsed.overrides)


def own_cases(of_suite: Sequence[Case], parsed: argparse.Namespace) -> tuple[Case, ...]:
    """Returns the cases of a suite with the given algorithm, preset, layout and calibration, and in every place also
    the strategies of --strategy. Raises UserError for a strategy that does not exist, an option that it does not have,
    and a file that cannot be written."""
    if parsed.csv and not parsed.csv.parent.is_dir():
        raise UserError(f"{parsed.csv} can't be written: there is no such folder; name another file")
    found = list(of_suite)
    if parsed.algorithm:
        first = [replace(case, algorithm=parsed.algorithm) for case in found if case.algorithm == found[0].algorithm]
        found = [case for case in found if case.algorithm == parsed.algorithm] or first
    where = {"preset": parsed.preset, "layout": parsed.layout, "calibration": calibration_of(parsed)}
    given = {name: value for name, value in where.items() if value}
    if (parsed.layout or "").startswith("1x"):  # one node has no network
        found = [replace(case, calibration=case.calibration.partition("+")[0]) for case in found]
    found = list({repr(moved): moved for moved in (replace(case, **given) for case in found)}.values())
    words = [word.removeprefix(OF_STRATEGY) for word in parsed.overrides if word.startswith(OF_STRATEGY)]
    if words and not parsed.strategy:
        raise UserError(f"{OF_STRATEGY}{words[0]}: the options of the shipped strategies are searched; give --strategy")
    options = dict(word.split("=", 1) for word in words)
    places = {(case.preset, case.layout, case.algorithm, case.calibration, case.overrides): case for case in found}
    for name in parsed.strategy:
        typed = load_strategy(name).typed(options)
        found += [replace(case, strategy=name, options=typed, exact=False, called="") for case in places.values()]
    return tuple(found)


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
