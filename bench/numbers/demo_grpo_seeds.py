"""`make demo-grpo` on five fixed seeds: does GRPO raise the share of held-out problems solved to 85%, in a minute?

Cost: five times the demo, about three minutes. Command: python -m bench demo-grpo-seeds
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.rows import train, write
from bench.tables import text_table

SEEDS = (0, 1, 2, 3, 4)
NUM_RANKS = 4
MOST_FIRST, LEAST_ACCURACY, MOST_S = 0.5, 0.85, 60.0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench demo-grpo-seeds", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE")
    parsed = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as runs:
        for row, _ in trained("demo-grpo-seeds", "arithmetic", Path(runs), parsed.overrides):
            rows.append(row | {"ok": row["accuracy_first"] <= MOST_FIRST and row["accuracy_last"] >= LEAST_ACCURACY})
    return judged("demo-grpo-seeds", rows, MOST_S)


def trained(bench: str, preset: str, runs: Path, overrides: list[str]) -> Iterator[tuple[dict, Path]]:
    """Trains a preset on each seed -> what became of it, and the folder of the run."""
    for seed in SEEDS:
        began, used = time.perf_counter(), _processor_s()
        options = ["--preset", preset, "--runs", str(runs), f"seed={seed}", *overrides]
        result, _ = train(NUM_RANKS, options)
        first, last = result["eval_mean@1_first"], result["eval_mean@1_last"]
        row = {
            "bench": bench,
            "seed": seed,
            "ranks": NUM_RANKS,
            "iterations": result["iterations"],
            "accuracy_first": first,
            "accuracy_last": last,
            "command_s": time.perf_counter() - began,
            "processor_s": _processor_s() - used,
        }
        print(f"seed {seed}: {first:.1%} -> {last:.1%}, {row['command_s']:.1f} s", flush=True)
        yield row, Path(result["run_dir"])


def judged(bench: str, rows: list[dict], most_s: float) -> int:
    """Writes and prints the rows -> the status. All have to be ok, in at most so many seconds in the median."""
    name = bench.replace("-", "_")
    median_s = sorted(row["command_s"] for row in rows)[len(rows) // 2]
    write(name, rows)
    print(text_table(name, rows))
    ok = all(row["ok"] for row in rows) and median_s <= most_s
    print(json.dumps({"bench": bench, "passed": sum(row["ok"] for row in rows), "median_s": median_s, "ok": ok}))
    return 0 if ok else 1


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
