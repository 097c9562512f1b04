"""What `bench scan` adds for one's own ideas: strategy files beside the shipped ones, another preset or layout,
options, and rows as CSV. None of it is written to bench/results/."""

import argparse
import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.baseline_tables import BASELINES
from bench.forecast.stages import STAGES
from bench.forecast.suites import Case, grid_of, stages, tuned
from bench.rows import STRATEGIES
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.strategy import Strategy, load_strategy

OF_STRATEGY = "strategy."  # the beginning of a word that is for the strategies of --strategy alone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command line."""
    parser.add_argument("--preset", help="instead of those of the suite; of --measure: one that has weights")
    parser.add_argument("--layout", metavar="NxG", help="instead of those of the suite")
    text = (
        "instead of those of the suite; sft, reward_model and dpo: their part of the suite stages, whose rows are kept"
    )
    parser.add_argument("--algorithm", metavar="NAME|FILE.py", help=text)
    parser.add_argument(
        "--strategy", action="append", default=[], metavar="NAME|FILE.py", help="beside the shipped ones"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE.csv", help="write the rows; replaces the file")
    text = "options, e.g. shape=actor=llama-70b,critic=llama-7b; strategy.NAME=VALUE is for --strategy alone"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=text)


def is_own(cases: Sequence[Case], parsed: argparse.Namespace) -> bool:
    """Whether the rows are not those of a suite, nor a part of them."""
    other = parsed.algorithm and parsed.algorithm not in {case.algorithm for case in cases}
    return bool(parsed.preset or parsed.layout or parsed.strategy or parsed.overrides or other)


def own_cases(cases: Sequence[Case], parsed: argparse.Namespace) -> tuple[Case, ...]:
    """The cases of a suite, with the algorithm, on the preset and the layout that are given, and the strategies of
    --strategy beside them in every place. Raises UserError for a strategy that does not exist, an option that it does
    not have, and a file that cannot be written."""
    if parsed.csv and not parsed.csv.parent.is_dir():
        raise UserError(f"{parsed.csv} can't be written: there is no such folder; name another file")
    if parsed.algorithm:
        of_algorithm = [case for case in cases if case.algorithm == parsed.algorithm]
        cases = of_algorithm or _with_algorithm(cases, parsed.algorithm)
    if parsed.preset or parsed.layout:
        presets, layouts = ([*dict.fromkeys(getattr(case, name) for case in cases)] for name in ("preset", "layout"))
        presets, layouts = [parsed.preset] if parsed.preset else presets, [parsed.layout] if parsed.layout else layouts
        kinds = (*STRATEGIES, *dict.fromkeys(case.strategy for case in cases if case.strategy in BASELINES))
        algorithms = dict.fromkeys(case.algorithm for case in cases)
        given = [name for name in algorithms if name in STAGES]
        found = [*stages(given, presets, layouts)]
        for name in (name for name in algorithms if name not in STAGES):
            found += [replace(case, algorithm=name) for case in tuned(presets, layouts, kinds)]
    else:
        found = list(cases)
    words = [word.removeprefix(OF_STRATEGY) for word in parsed.overrides if word.startswith(OF_STRATEGY)]
    if words and not parsed.strategy:
        raise UserError(f"{OF_STRATEGY}{words[0]}: the options of the shipped strategies are searched; give --strategy")
    options = dict(word.split("=", 1) for word in words)
    places = dict.fromkeys((case.preset, case.layout, case.nodes, case.algorithm, case.overrides) for case in found)
    for name in parsed.strategy:
        typed = load_strategy(name).typed(options)
        found += [
            Case(preset, layout, name, typed, nodes, algorithm=algorithm, overrides=overrides)
            for preset, layout, nodes, algorithm, overrides in places
        ]
    return tuple(found)


def _with_algorithm(cases: Sequence[Case], algorithm: str) -> list[Case]:
    """The cases of the first algorithm of a suite, with another one."""
    return [replace(case, algorithm=algorithm) for case in cases if case.algorithm == cases[0].algorithm]


def own_grid(strategy: Strategy, num_devices: int) -> dict[str, tuple]:
    """What is searched over for a strategy of one's own: those of its options that have usual names."""
    usual = {"tp": (1, 2, 4, 8), "pp": (1, 2, 4, 8), "inference_pp": (1, 2, 4), "generation_pp": (1, 2, 4)}
    usual |= grid_of("reallocation", num_devices)
    return {name: usual[name] for name in strategy.parameters if name in usual}


def workload_words(overrides: Iterable[str]) -> list[str]:
    """The overrides that are not for strategies."""
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
