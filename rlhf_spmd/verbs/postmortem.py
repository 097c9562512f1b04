"""The postmortem verb: which rank was missing where the others waited when a run ended, read from its run folder."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rlhf_spmd.runtime.guard.diagnose import Steps
from rlhf_spmd.runtime.guard.last_checkpoint import newest_checkpoint
from rlhf_spmd.runtime.guard.postmortem import divergence, how_ended, numbers_of, records_of, state_of, whole_text
from rlhf_spmd.runtime.observe.flight_recorder import NOWHERE, read_message

SHOWN = 12  # entries per rank


def run(parsed: argparse.Namespace) -> int:
    """Prints what the records tell and, last, a line of JSON -> the exit status. Raises UserError."""
    print(json.dumps(postmortem(parsed.run)))
    return 0


def postmortem(folder: str | Path) -> dict[str, Any]:
    """Prints which rank was missing where the others waited; returns the same as numbers. UserError as in status."""
    run = Path(folder)
    records, steps = records_of(run), Steps.read(run)
    message = read_message(run)
    found = divergence(records, steps)
    print(f"{run}: {state_of(records, time.time())}")
    if message:
        print("What was said at the end:")
        print("".join(f"  {line}\n" for line in message.splitlines()), end="")
    print("First divergence: " + (found.text if found else "none, as far as the records tell"))
    for record in records:
        print(f"rank {record.rank} on {record.host}, process {record.process}{how_ended(record)}, last did:")
        for entry in record.entries[-SHOWN:]:
            end_s = entry.end_s or max(record.end_s, record.beat_s, entry.begin_s)
            place = "" if entry.position == NOWHERE else f"{entry.position:>4}"
            clock = time.strftime("%H:%M:%S", time.localtime(entry.begin_s)) + f".{int(entry.begin_s % 1 * 1000):03d}"
            print(f"  {clock} {place:>4} {end_s - entry.begin_s:9.4f} s  {whole_text(entry, record.rank, steps)}")
    newest = newest_checkpoint(run)
    return {
        "run": str(run),
        "culprits": list(found.culprits) if found else [],
        "waiting": list(found.waiting) if found else [],
        "divergence": found.text if found else None,
        "message": message,
        "checkpoint": str(newest) if newest else None,
        "ranks": [numbers_of(record, time.time()) for record in records],
        "ok": True,
    }
