"""Suites as data (suites.toml): which presets, layouts and strategies are forecast, over which options, and what is
claimed of them.

`python -m bench scan --suite NAME` runs one. Every suite has the same rows (bench/forecast/scan.py) and shows other
columns.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from bench.forecast import claims

DEVICE = "a100-80g"  # a type, and the calibration of this name
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Case:
    """One forecast.

    layout: with a plus between nodes of different types of device, in the order of the calibration.
    options: of the strategy; a value that is a tuple is searched over, and so is what grid_of() says of the others.
    exact: these options and no others, whether they fit or not.
    algorithm: name of a page.
    calibration: of the devices, perhaps with a network.
    overrides: options of the run.
    called: the strategy in rows, if not by its name.
    """

    preset: str
    layout: str
    strategy: str
    options: Mapping[str, Any]
    exact: bool = False
    algorithm: str = "ppo"
    calibration: str = DEVICE
    overrides: tuple[str, ...] = ()
    called: str = ""


@dataclass(frozen=True, slots=True)
class Suite:
    """Cases with options that all have, the claims that are made of their rows, and which of these make `ok`.

    decoded: how many sequences a copy of the actor decodes at once, of which each case has the best; (): as the preset.
    """

    title: str
    cases: tuple[Case, ...]
    claims: Callable[[Sequence[Mapping]], claims.Claims]
    promised: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    decoded: tuple[int, ...] = ()


def frozen(value: Any) -> Any:
    """Returns a value of the table with tuples for its lists."""
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def options(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a strategy in the table."""
    return {name: frozen(value) for name, value in table.items() if name != "strategy"}


GRIDS: dict[str, dict[str, tuple]] = {strategy: options(grid) for strategy, grid in TABLE["grids"].items()}


def grid_of(strategy: str, num_devices: int) -> dict[str, tuple]:
    """Returns the options that are searched over: option -> values. Points that a strategy refuses cost nothing."""
    if strategy != "separation":
        return dict(GRIDS[strategy])
    return {"generation_ranks": tuple(num_devices * quarters // 4 for quarters in (1, 2, 3)), **GRIDS[strategy]}


def later_grid_of(strategy: str, num_devices: int) -> dict[str, tuple]:
    """Returns the options that are chosen one after another, once those of grid_of() are known."""
    if strategy not in ("separation", "heterogeneous"):
        return {}
    later: dict[str, tuple] = {
        "chain": (False, True),
        "decode_mini_batches": (1, 4, 8),
        "in_flight": (1, 4),
        "stream": (False,),
    }
    if strategy == "heterogeneous":
        return later
    ranks = tuple(num_devices * eighths // 8 for eighths in range(1, 8)) if num_devices >= 8 else ()
    return {"generation_ranks": ranks} | later


def cases(block: Mapping[str, Any]) -> Iterator[Case]:
    """Combines algorithms, places, calibrations, overrides and strategies of a block of the table."""
    places = block.get("places") or map(" ".join, product(block["presets"], block["layouts"]))
    for algorithm, place in product(block.get("algorithms", ["ppo"]), places):
        preset, layout, *calibration = place.split()
        calibrations = calibration or block.get("calibrations", [DEVICE])
        strategies = TABLE["strategies"][block["strategies"]].items()
        for machine, words, (name, table) in product(calibrations, block.get("overrides", [""]), strategies):
            strategy = table.get("strategy", name)
            yield Case(
                preset,
                layout,
                strategy,
                options(table) | block.get("given", {}),
                exact="given" in block,
                algorithm=algorithm,
                calibration=machine,
                overrides=tuple(words.split()),
                called="" if strategy == name else name,
            )


SUITES = {
    name: Suite(
        suite["title"],
        tuple(case for block in suite["cases"] for case in cases(block)),
        getattr(claims, suite["claims"]),
        *(tuple(suite.get(part, ())) for part in ("promised", "overrides", "decoded")),
    )
    for name, suite in TABLE["suites"].items()
}
STAGES = tuple(dict.fromkeys(case.algorithm for case in SUITES["stages"].cases))  # that generate nothing
