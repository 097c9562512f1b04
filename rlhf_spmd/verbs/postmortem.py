"""The postmortem subcommand: reads from a run folder which rank the others waited for when the run ended."""

import argparse
import time
from pathlib import Path

from rlhf_spmd.runtime.diagnosis.diagnose import WaitGraph
from rlhf_spmd.runtime.diagnosis.postmortem import (
    find_divergence,
    full_text,
    how_ended,
    records_of,
    run_status,
    to_json,
)
from rlhf_spmd.runtime.guard.last_checkpoint import newest_checkpoint
from rlhf_spmd.runtime.guard.terminal import print_json
from rlhf_spmd.runtime.observe.flight_recorder import NOWHERE, read_message

SHOWN = 12  # entries per rank


def run(parsed: argparse.Namespace) -> int:
    """Prints which rank the others waited for and, last, a line of JSON -> the exit status. Raises UserError if it is
    not a run folder."""
    run = Path(parsed.run)
    records, graph = records_of(run), WaitGraph.read(run)
    message = read_message(run)
    divergence = find_divergence(records, graph)
    print(f"{run}: {run_status(records, time.time())}")
    if message:
        print("The error message:")
        print("".join(f"  {line}\n" for line in message.split("\n")), end="")
    print("First divergence: " + (divergence.text if divergence else "none in the records"))
    for record in records:
        print(f"rank {record.rank} on {record.host}, process {record.process}{how_ended(record)}, last did:")
        for entry in record.entries[-SHOWN:]:
            end_s = entry.end_s or max(record.end_s, record.beat_s, entry.begin_s)
            place = "" if entry.position == NOWHERE else f"{entry.position:>4}"
            clock = time.strftime("%H:%M:%S", time.localtime(entry.begin_s)) + f".{int(entry.begin_s % 1 * 1000):03d}"
            print(f"  {clock} {place:>4} {end_s - entry.begin_s:9.4f} s  {full_text(entry, record.rank, graph)}")
    newest = newest_checkpoint(run)
    result = {
        "run": str(run),
        "late": list(divergence.late) if divergence else [],
        "waiting": list(divergence.waiting) if divergence else [],
        "divergence": divergence.text if divergence else None,
        "message": message,
        "checkpoint": str(newest) if newest else None,
        "ranks": [to_json(record, time.time()) for record in records],
        "ok": True,
    }
    print_json(result, parsed.json)
    return 0
