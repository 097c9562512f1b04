"""The verbs `status` and `postmortem`: what the ranks of a run do now, and which of them stood where when it ended.

Both read the run folder and nothing else, from any machine that sees it. No torch, no MPI.
"""

import json
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.guard.diagnose import Divergence, Standing, Steps, diagnose
from rlhf_spmd.runtime.guard.last_checkpoint import newest_checkpoint
from rlhf_spmd.runtime.guard.signals import TERMINATED_STATUS
from rlhf_spmd.runtime.observe.flight_recorder import NOWHERE, Entry, Record, read_message, read_records

STALE_S = 15.0  # supervisors write twice a second, but a file system of several nodes may show it later
RECENT = 10  # iterations that rates are taken from
SHOWN = 12  # entries per rank in a postmortem
WAITS = ("Wait ", "Agree ", "waiting for")
COLUMNS = ("rank", "host", "state", "memory", "seen", "for", "what it does")
STATES = {"R": "runs", "S": "sleeps", "D": "disk", "T": "STOPPED", "t": "STOPPED", "Z": "ended"}


def status(folder: str | Path) -> dict[str, Any]:
    """Prints one screen about a run; returns the same as numbers. Raises UserError if this is no run folder."""
    run, now = Path(folder), time.time()
    records = _records(run)
    metrics = _metrics(run)
    total = _total(run)
    recent = metrics[-RECENT:]
    seconds = [row["iteration_s"] for row in recent if row.get("iteration_s")]
    pace_s = statistics.median(seconds) if seconds else None
    tokens_s = [row["gen_tokens_per_s"] for row in recent if row.get("gen_tokens_per_s")]
    speed = statistics.median(tokens_s) if tokens_s else None
    slowest = slowest_rank(records)
    newest = newest_checkpoint(run)
    state = _state_of(records, now)
    print(f"{run}: {state}")
    of = f" of {total}" if total else ""
    left = ""
    if pace_s and total and state == "running":
        left = f", about {pace_s * (total - len(metrics)):,.0f} s left"
    pace = f", {pace_s:.2f} s each{left}" if pace_s else ""
    print(f"  iterations  {len(metrics)}{of} done{pace}" + (f", {speed:,.0f} tokens/s generated" if speed else ""))
    if metrics:
        shown = {name: metrics[-1].get(name) for name in ("reward", "kl", "response_length")}
        print("  last        " + ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if value is not None))
    age_s = now - (newest / "manifest.json").stat().st_mtime if newest else 0.0
    print(f"  checkpoint  {newest.name}, {age_s:,.0f} s ago" if newest else "  checkpoint  none yet")
    if slowest is not None:
        rank, share = slowest
        print(f"  slowest     rank {rank}: it waits least, {share:.0%} of its time")
    print(_table([_row(record, now) for record in records]))
    return {
        "run": str(run),
        "state": state,
        "iteration": len(metrics),
        "iterations": total,
        "iteration_s": pace_s,
        "gen_tokens_per_s": speed,
        "slowest_rank": slowest[0] if slowest else None,
        "checkpoint": str(newest) if newest else None,
        "ranks": [_numbers(record, now) for record in records],
        "ok": state in ("running", "finished"),
    }


def postmortem(folder: str | Path) -> dict[str, Any]:
    """Prints which rank was missing where the others waited; returns the same as numbers. UserError as in status."""
    run = Path(folder)
    records, steps = _records(run), Steps.read(run)
    message = read_message(run)
    found = divergence(records, steps)
    print(f"{run}: {_state_of(records, time.time())}")
    if message:
        print("What was said at the end:")
        print("".join(f"  {line}\n" for line in message.splitlines()), end="")
    print("First divergence: " + (found.text if found else "none, as far as the records tell"))
    for record in records:
        print(f"rank {record.rank} on {record.host}, process {record.process}{_ended(record)}, last did:")
        for entry in record.entries[-SHOWN:]:
            end_s = entry.end_s or max(record.end_s, record.beat_s, entry.begin_s)
            place = "" if entry.position == NOWHERE else f"{entry.position:>4}"
            clock = time.strftime("%H:%M:%S", time.localtime(entry.begin_s)) + f".{int(entry.begin_s % 1 * 1000):03d}"
            print(f"  {clock} {place:>4} {end_s - entry.begin_s:9.4f} s  {_whole(entry, record.rank, steps)}")
    newest = newest_checkpoint(run)
    return {
        "run": str(run),
        "culprits": list(found.culprits) if found else [],
        "waiting": list(found.waiting) if found else [],
        "divergence": found.text if found else None,
        "message": message,
        "checkpoint": str(newest) if newest else None,
        "ranks": [_numbers(record, time.time()) for record in records],
        "ok": True,
    }


def divergence(records: Sequence[Record], steps: Steps | None) -> Divergence | None:
    """The first divergence in the records of a run; None if it ended well, or if they show none."""
    if all(record.end_s and not record.status and not record.signal for record in records):
        return None
    last_s = max(max(record.beat_s, record.end_s) for record in records)
    standings = [
        Standing(
            rank=record.rank,
            host=record.host,
            text=record.text,
            iteration=record.iteration,
            position=record.position,
            for_s=max(last_s - record.since_s, 0.0),
            trouble=_trouble(record, last_s),
        )
        for record in records
    ]
    return diagnose(standings, steps)


def slowest_rank(records: Sequence[Record]) -> tuple[int, float] | None:
    """The rank that spends the least of its time waiting for others, and the share; None for a single rank."""
    shares = []
    for record in records:
        ended = [entry for entry in record.entries if entry.end_s and entry.position != NOWHERE]
        total_s = sum(entry.end_s - entry.begin_s for entry in ended)
        waited_s = sum(entry.end_s - entry.begin_s for entry in ended if any(word in entry.text for word in WAITS))
        if total_s > 0:
            shares.append((waited_s / total_s, record.rank))
    if len(shares) < 2:
        return None
    share, rank = min(shares)
    return rank, share


def _records(run: Path) -> list[Record]:
    if not run.is_dir():
        raise UserError(f"{run} is no folder; give the run folder that train printed")
    records = read_records(run)
    if not records:
        raise UserError(f"{run} has no flight records; `train` writes them once it has made its run folder")
    return records


def _metrics(run: Path) -> list[dict[str, Any]]:
    rows = []
    if (run / "metrics.jsonl").exists():
        for line in (run / "metrics.jsonl").read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:  # the last line of a killed run may be cut
                continue
    return rows


def _total(run: Path) -> int | None:
    try:
        return int(json.loads((run / "config.json").read_text())["iterations"])
    except (OSError, ValueError, KeyError):
        return None


def _state_of(records: Sequence[Record], now: float) -> str:
    if all(record.end_s and record.status == TERMINATED_STATUS for record in records):
        return "ended by SIGTERM"
    if all(record.end_s for record in records):
        return "finished" if not any(record.status or record.signal for record in records) else "failed"
    if any(record.end_s and (record.status or record.signal) for record in records):
        return "failed"
    silent = [record.rank for record in records if not record.end_s and now - record.beat_s > STALE_S]
    if len(silent) == len(records):
        return "ended without a word (its supervisors are silent)"
    return f"running, but ranks {silent} are silent" if silent else "running"


def _trouble(record: Record, last_s: float) -> str:
    if record.signal:
        return f"it was ended by {signal.Signals(record.signal).name}"
    if record.state in ("T", "t"):
        return "it was stopped (SIGSTOP)"
    if not record.end_s and last_s - record.beat_s > STALE_S:
        return f"its supervisor fell silent {last_s - record.beat_s:.0f} s before the last of the others"
    return ""


def _whole(entry: Entry, rank: int, steps: Steps | None) -> str:
    """What an entry says; the recorder keeps only the first letters, the instruction lists have the rest."""
    if steps is not None and 0 <= entry.position < len(steps.of_rank[rank]):
        text = f"iteration {entry.iteration}: {steps.of_rank[rank][entry.position].text}"
        return text if text.startswith(entry.text) else entry.text
    return entry.text


def _ended(record: Record) -> str:
    if record.signal:
        return f", ended by {signal.Signals(record.signal).name}"
    return f", ended with status {record.status}" if record.end_s else ""


def _numbers(record: Record, now: float) -> dict[str, Any]:
    return {
        "rank": record.rank,
        "host": record.host,
        "process": record.process,
        "state": record.state,
        "iteration": record.iteration,
        "position": record.position,
        "doing": record.text,
        "for_s": round(now - record.since_s, 3),
        "memory_bytes": record.memory_bytes,
        "most_memory_bytes": record.most_memory_bytes,
        "device_bytes": record.device_bytes,
        "heartbeat_age_s": round(now - record.beat_s, 3),
        "ended": bool(record.end_s),
        "status": record.status,
        "signal": record.signal,
    }


def _row(record: Record, now: float) -> tuple[str, ...]:
    memory = f"{record.memory_bytes / 2**30:.2f} GiB"
    memory += f" + {record.device_bytes / 2**30:.1f} on device" if record.device_bytes else ""
    state = "ended" if record.end_s else STATES.get(record.state, record.state)
    seen, since = f"{now - record.beat_s:,.1f} s ago", f"{now - record.since_s:,.1f} s"
    return str(record.rank), record.host, state, memory, seen, since, record.where


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in [COLUMNS, *rows]) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [COLUMNS, *rows]]
    return "\n".join("  " + line.rstrip() for line in lines)
