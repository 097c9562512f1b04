"""Names of metrics in TRL and verl, for TensorBoard and Weights & Biases (`logging.aliases`); metrics.jsonl keeps ours.

A dashboard made for one of these programs then shows a run of this one. Read in TRL 1.16 (names with the prefix that
transformers adds for both trackers) and verl of 2026. TRL divides variances by n - 1, this program by n.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FUNCTION = "{function}"  # in a name: that of each reward function
TABLE: Mapping[str, list[dict[str, Any]]]
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


class Alias(NamedTuple):
    """A metric of another program: the sum of metrics of this one, or 1 minus it."""

    name: str
    ours: tuple[str, ...]
    complement: bool


def aliases_of(
    system: str, algorithm: str, options: Any, functions: Sequence[str] = (), *, parts: bool = False
) -> list[Alias]:
    """Returns the aliases of a run.

    system: a key of TABLE, or `none`.
    options: of the algorithm.
    functions: the names of its reward functions; the score of a single one is `score`.
    parts: whether even a single one is a part of a sum.
    """
    aliases = []
    for row in TABLE.get(system, ()):
        is_of_algorithm = algorithm in row.get("algorithms", [algorithm])
        holds = all(getattr(options, name, value) == value for name, value in row.get("when", {}).items())
        for function in functions if FUNCTION in row["name"] else [""]:
            score = "score" if len(functions) == 1 and not parts else f"score_{function}"
            if is_of_algorithm and holds:
                ours = tuple(name.replace(f"score_{FUNCTION}", score) for name in row["ours"])
                aliases.append(Alias(row["name"].replace(FUNCTION, function), ours, "complement" in row))
    return aliases


def aliased(aliases: Sequence[Alias], metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics that have aliases, under these names."""
    values = {}
    for alias in aliases:
        if all(name in metrics for name in alias.ours):
            total = sum(metrics[name] for name in alias.ours)
            values[alias.name] = 1.0 - total if alias.complement else total
    return values
