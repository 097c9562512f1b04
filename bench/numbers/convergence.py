"""Does the placement change what is learned? Reward and KL of the embedded model under five strategies, compared.

Four ranks, float32, ten iterations with one seed; the curves must be those of flattening to 1e-4.

Cost: five minutes on two cores. Command: python -m bench convergence
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence

from bench.plots import differences
from bench.rows import RESULTS, train, write
from bench.tables import text_table

NUM_RANKS = 4
OPTIONS = ("iterations=10", "num_samples=0")
CASES = {
    "flattening": (),
    "interleaving1": (),
    "interleaving2": (),
    "separation": (),
    "reallocation": ("strategy.training_tp=2", "strategy.training_pp=2"),
}
TOLERANCE = 1e-4  # of rewards, and of nats


def largest_difference(mine: Sequence[Mapping], expected: Sequence[Mapping]) -> float:
    """The largest difference of mean reward and of KL over all iterations. Raises ValueError if one run is longer."""
    pairs = list(zip(mine, expected, strict=True))
    return max(abs(a[name] - b[name]) for a, b in pairs for name in ("reward", "kl"))


def rows_of(runs: Mapping[str, Sequence[Mapping]]) -> list[dict]:
    """A row per strategy from the metrics of its iterations; the others are compared with the first strategy."""
    base = next(iter(runs.values()))
    rows = []
    for name, metrics in runs.items():
        row = {
            "bench": "convergence",
            "ranks": NUM_RANKS,
            "strategy": name,
            "options": " ".join(CASES[name]),
            "rewards": [one["reward"] for one in metrics],
            "kls": [one["kl"] for one in metrics],
            "difference": largest_difference(metrics, base),
        }
        rows.append(row | {"ok": row["difference"] <= TOLERANCE})
    return rows


def main(arguments: list[str]) -> int:
    argparse.ArgumentParser(prog="bench convergence", description=__doc__.partition("\n")[0]).parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: train(NUM_RANKS, ["--runs", folder, "--strategy", name, *OPTIONS, *more])[1]
            for name, more in CASES.items()
        }
    rows = rows_of(runs)
    print(text_table("convergence", rows))
    write("convergence", rows)
    differences(rows, RESULTS / "convergence.png", promise=TOLERANCE)
    ok = all(row["ok"] for row in rows)
    largest = max(row["difference"] for row in rows)
    print(json.dumps({"bench": "convergence", "strategies": len(rows), "largest_difference": largest, "ok": ok}))
    return 0 if ok else 1
