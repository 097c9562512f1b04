"""The postmortem subcommand: reads from a run folder which rank the others waited for when the run ended."""

import argparse
import time
from pathlib import Path

from rlhf_spmd.files.output import print_json
from rlhf_spmd.runtime.failure.diagnosis import WaitGraph
from rlhf_spmd.runtime.failure.last_checkpoint import newest_checkpoint
from rlhf_spmd.runtime.failure.postmortem import (
    STOPPED_BY_USER,
    find_divergence,
    how_ended,
    records_of,
    run_status,
    to_json,
)
from rlhf_spmd.runtime.failure.records import NOWHERE, read_message

SHOWN = 12  # entries per rank


def run(parsed: argparse.Namespace) -> int:
    """Prints which rank the others waited for and, last, a line of JSON -> the exit status. Raises UserError if it is
    not a run folder."""
    run = Path(parsed.run)
    records, graph = records_of(run), WaitGraph.read(run)
    message = read_message(run)
    state = run_status(records, time.time(), message)
    divergence = None if state == STOPPED_BY_USER else find_divergence(records, graph)
    print(f"{run}: {state}")
    if message:
        print("The error message:")
        print("".join(f"  {line}\n" for line in message.split("\n")), end="")
    if state != STOPPED_BY_USER:
        print("First divergence: " + (divergence.text if divergence else "none in the records"))
    for record in records:
        print(f"rank {record.rank} on {record.host}, process {record.process}{how_ended(record)}, last did:")
        for action in record.last_actions()[-SHOWN:]:
            end_s = action.end_s or max(record.end_s, record.beat_s, action.begin_s)
            place = "" if action.position == NOWHERE else f"{action.position:>4}"
            clock = time.strftime("%H:%M:%S", time.localtime(action.begin_s)) + f".{int(action.begin_s % 1 * 1000):03d}"
            print(f"  {clock} {place:>4} {end_s - action.begin_s:9.4f} s  {action.text}")
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
