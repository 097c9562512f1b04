"""`make demo-grpo` on five fixed seeds: does GRPO raise the share of held-out problems solved to 85%, in a minute?

Cost: five times the demo, about three minutes. Command: python -m bench demo-grpo-seeds
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.rows import RESULTS, read_rows, train, write
from bench.tables import text_table

SEEDS = (0, 1, 2, 3, 4)
NUM_RANKS = 4
MOST_FIRST, LEAST_ACCURACY, MOST_S = 0.5, 0.85, 60.0


def main(arguments: list[str]) -> int:
    parsed = parse("demo-grpo-seeds", __doc__, arguments)

    def is_ok(row: dict, run: Path) -> bool:
        return row["accuracy_first"] <= MOST_FIRST and row["accuracy_last"] >= LEAST_ACCURACY

    return measure("demo-grpo-seeds", "arithmetic", parsed, is_ok, most_s=MOST_S)


def parse(bench: str, about: str | None, arguments: list[str]) -> argparse.Namespace:
    """The command line of a bench that trains a preset on each seed."""
    parser = argparse.ArgumentParser(prog=f"bench {bench}", description=about)
    parser.add_argument("--missing", action="store_true", help="only the seeds that the results lack")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE")
    return parser.parse_args(arguments)


def measure(
    bench: str, preset: str, parsed: argparse.Namespace, is_ok: Callable[[dict, Path], bool], *, most_s: float
) -> int:
    """Trains a preset on each seed, and writes each row at once -> the status. is_ok: of a row and the run folder,
    may add to the row. most_s: of a command, in the median."""
    name = bench.replace("-", "_")
    path = RESULTS / f"{name}.jsonl"
    rows = read_rows(path) if parsed.missing and path.exists() else []
    with tempfile.TemporaryDirectory() as runs:
        for seed in [one for one in SEEDS if one not in {row["seed"] for row in rows}]:
            began, used = time.perf_counter(), _processor_s()
            result, _ = train(NUM_RANKS, ["--preset", preset, "--runs", runs, f"seed={seed}", *parsed.overrides])
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
            ok = is_ok(row, Path(result["run_dir"]))
            rows.append(row | {"ok": ok})
            rows = read_rows(write(name, rows))
            print(f"seed {seed}: {first:.1%} -> {last:.1%}, {row['command_s']:.1f} s", flush=True)
    median_s = sorted(row["command_s"] for row in rows)[len(rows) // 2]
    print(text_table(name, rows))
    ok = all(row["ok"] for row in rows) and median_s <= most_s
    print(json.dumps({"bench": bench, "passed": sum(row["ok"] for row in rows), "median_s": median_s, "ok": ok}))
    return 0 if ok else 1


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
