"""The status subcommand: reads from a run folder what its ranks are doing now."""

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

from rlhf_spmd.files.output import print_json, table_width
from rlhf_spmd.plan.text.program_listing import table
from rlhf_spmd.runtime.failure.last_checkpoint import MANIFEST, newest_checkpoint
from rlhf_spmd.runtime.failure.postmortem import records_of, run_status, slowest_rank, to_json
from rlhf_spmd.runtime.failure.records import Record, read_message
from rlhf_spmd.runtime.records.run_files import read_config, read_rows, reported

RECENT = 10  # iterations of which the medians of seconds and tokens are taken
COLUMNS = ("rank", "host", "state", "memory", "seen", "for", "what it does")
STATES = {"running": "runs", "sleeping": "sleeps", "disk-sleep": "disk", "zombie": "ended"}
STATES |= {"stopped": "STOPPED", "tracing-stop": "STOPPED"}


def run(parsed: argparse.Namespace) -> int:
    """Prints one screen and, last, a line of JSON -> the exit status. Raises UserError if it is not a run folder."""
    run, now = Path(parsed.run), time.time()
    records = records_of(run)
    metrics, config = read_rows(run / "metrics.jsonl"), read_config(run)
    total = config.get("iterations") if isinstance(config.get("iterations"), int) else None
    pace_s, speed = _recent(metrics, "iteration_s"), _recent(metrics, "gen_tokens_per_s")
    slowest, newest, state = slowest_rank(records), newest_checkpoint(run), run_status(records, now, read_message(run))
    last = metrics[-1] if metrics else {}
    parts = [name for name in last if name.startswith("score_") and not name.endswith("_std")]
    values = {name: last.get(name) for name in (*reported(run, config).headlines, *parts, "response_length")}
    numbers = [f"{name} {value:.4g}" for name, value in values.items() if isinstance(value, int | float)]
    facts = [f"{len(metrics)} of {total} done" if total else f"{len(metrics)} done"]
    facts += [f"{pace_s:.2f} s each"] if pace_s else []
    facts += [f"about {pace_s * (total - len(metrics)):,.0f} s left"] if pace_s and total and state == "running" else []
    facts += [f"{speed:,.0f} tokens/s generated"] if speed else []
    print(f"{run}: {state}\n  iterations  {', '.join(facts)}")
    if numbers:
        print(f"  last        {', '.join(numbers)}")
    age_s = now - (newest / MANIFEST).lstat().st_mtime if newest else 0.0
    print(f"  checkpoint  {newest.name}, {age_s:,.0f} s ago" if newest else "  checkpoint  none yet")
    if slowest is not None:
        print(f"  slowest     rank {slowest[0]}: it waits least, {slowest[1]:.0%} of its time")
    print(table([COLUMNS, *(_row(record, now) for record in records)], table_width()))
    result = {
        "run": str(run),
        "state": state,
        "iteration": len(metrics),
        "iterations": total,
        "iteration_s": pace_s,
        "gen_tokens_per_s": speed,
        "slowest_rank": slowest and slowest[0],
        "checkpoint": newest and str(newest),
        "ranks": [to_json(record, now) for record in records],
        "ok": state in ("running", "finished"),
    }
    print_json(result, parsed.json)
    return 0


def _recent(metrics: list[dict[str, Any]], name: str) -> float | None:
    """Returns the median of a metric over the last iterations."""
    values = [row.get(name) for row in metrics[-RECENT:]]
    numbers = [value for value in values if isinstance(value, int | float) and value and math.isfinite(value)]
    return statistics.median(numbers) if numbers else None


def _row(record: Record, now: float) -> tuple[str, ...]:
    memory = f"{record.memory_bytes / 2**30:.2f} GiB"
    memory += f" + {record.device_bytes / 2**30:.1f} on device" if record.device_bytes else ""
    state = "ended" if record.end_s else STATES.get(record.state, record.state)
    seen, since = f"{now - record.beat_s:,.1f} s ago", f"{now - record.now.since_s:,.1f} s"
    doing = "" if record.end_s and not (record.status or record.signal) else record.where
    return str(record.rank), record.host, state, memory, seen, since, doing
