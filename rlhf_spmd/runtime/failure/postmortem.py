"""Analyses the records in a run folder: the first divergence of the ranks, the slowest rank, how each ended.

Needs only the run folder, on any machine that can read it. No torch, no MPI.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import is_folder, why_no_file
from rlhf_spmd.runtime.failure.diagnosis import Divergence, RankState, WaitGraph, diagnose
from rlhf_spmd.runtime.failure.records import NOWHERE, Record, read_records
from rlhf_spmd.runtime.failure.signals import INTERRUPTED, TERMINATED_STATUS, signal_name

STALE_S = 15.0  # supervisors write twice a second, but a shared file system may show it later
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
STOPPED_BY_USER = "stopped by SIGINT (Ctrl-C)"
LEAST_SHARE = 0.05  # of its time that another rank waits more than the slowest one
WAITS = ("Wait ", "Agree ", "waiting for")
REPORTED = (  # fields of a record in the verbs' JSON
    *("rank", "host", "process", "state", "memory_bytes", "most_memory_bytes", "device_bytes", "status", "signal"),
)


def find_divergence(records: Sequence[Record], graph: WaitGraph | None) -> Divergence | None:
    """Returns the first divergence in the records of a run; None if it ended successfully or the records show none."""
    if all(record.end_s and not record.status and not record.signal for record in records):
        return None
    last_s, states = max(max(record.beat_s, record.end_s) for record in records), []
    for record in records:
        now, for_s = record.now, max(last_s - record.now.since_s, 0.0)
        place = now.text, now.iteration, now.position
        states.append(RankState(record.rank, record.host, *place, for_s, _trouble_of(record, last_s)))
    return diagnose(states, graph)


def _trouble_of(record: Record, last_s: float) -> str:
    """Returns the known problem of a rank; empty if there is none."""
    if record.signal:
        return f"it was ended by {signal_name(record.signal)}"
    if record.state in STOPPED:
        return "it was stopped (SIGSTOP)"
    if not record.end_s and last_s - record.beat_s > STALE_S:
        return f"its supervisor stopped reporting {last_s - record.beat_s:.0f} s before the others"
    return ""


def slowest_rank(records: Sequence[Record]) -> tuple[int, float] | None:
    """Returns the rank that spends the smallest share of its time waiting for others, and this share; None for one
    rank, and where all wait alike."""
    shares = []
    for record in records:
        total_s = waited_s = 0.0
        for action in record.last_actions():
            if action.position != NOWHERE and action.end_s:
                total_s += action.end_s - action.begin_s
                is_wait = any(word in action.text for word in WAITS)
                waited_s += (action.end_s - action.begin_s) * is_wait
        if total_s > 0:
            shares.append((waited_s / total_s, record.rank))
    share, rank = min(shares, default=(0.0, 0))
    return (rank, share) if max(shares, default=(0.0, 0))[0] - share >= LEAST_SHARE else None


def check_is_folder(folder: Path) -> None:
    """Raises UserError if what a command names as a run folder is not a folder."""
    if not is_folder(folder):
        why = why_no_file(folder)
        why = why if why.startswith("can't") else "is not a folder"
        raise UserError(f"{folder} {why}; give the run folder that train printed")


def records_of(folder: Path) -> list[Record]:
    """Returns the records of a run folder, by rank. Raises UserError if there are none."""
    check_is_folder(folder)
    records = read_records(folder)
    if not records:
        raise UserError(f"{folder} has no flight records; `train` writes them after it has created its run folder")
    return records


def run_status(records: Sequence[Record], now: float, message: str | None = None) -> str:
    """Returns whether a run is still running, or how it ended. message: of the run, if it has left one."""
    if (message or "").startswith(INTERRUPTED):
        return STOPPED_BY_USER
    if all(record.end_s and record.status == TERMINATED_STATUS for record in records):
        return "ended by SIGTERM"
    if any(record.end_s and (record.status or record.signal) for record in records):
        return "failed"
    if all(record.end_s for record in records):
        return "finished"
    silent = [record.rank for record in records if not record.end_s and now - record.beat_s > STALE_S]
    if len(silent) == len(records):
        return "ended without a message (its supervisors are silent)"
    return f"running, but ranks {silent} are silent" if silent else "running"


def how_ended(record: Record) -> str:
    """Returns signal or status of a rank that has ended; empty while it runs."""
    if record.signal:
        return f", ended by {signal_name(record.signal)}"
    return f", ended with status {record.status}" if record.end_s else ""


def to_json(record: Record, now: float) -> dict[str, Any]:
    """Returns a record as JSON-able values."""
    values = {name: getattr(record, name) for name in REPORTED}
    values |= {"iteration": record.now.iteration, "position": record.now.position, "doing": record.now.text}
    ages = {"for_s": round(now - record.now.since_s, 3), "heartbeat_age_s": round(now - record.beat_s, 3)}
    return values | ages | {"ended": bool(record.end_s)}
