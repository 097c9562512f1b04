"""Whole steps of SmolLM2-135M with adapters (LoRA) by both programs, and of all weights by ours, in turns.

As in given_steps.py; TRL's adapters are peft's. Rank 16 and alpha 32 in all linear layers but the output layer. With
adapters, the reference of DPO is the base in both programs. Memory is the most that a process held.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.against_trl.given_steps import ours, rounds_of, theirs
from bench.against_trl.given_work import GivenWork

RANK, ROUNDS = 16, 3
MEMORY = 0.7  # at most, as a share of that with all weights
PROGRAMS = ("full", "ours", "peer")


def measured(model: Path, folder: Path, works: Sequence[GivenWork]) -> list[dict]:
    """A row for each kind of work."""
    rows = []
    for number, of in enumerate(works):
        scratch = folder / str(number)
        commands = {"full": ours(of, model, scratch), "ours": ours(of, model, scratch, RANK)}
        commands["peer"] = theirs(of, model, RANK)
        rows.append(row_of(of, rounds_of(of, commands, scratch, ROUNDS)))
        print(show(rows[-1]), flush=True)
    return rows


def row_of(of: GivenWork, rounds: Sequence[dict]) -> dict:
    """Medians over the rounds."""
    row = {"model": "SmolLM2-135M", "dtype": "float32", "threads": 1, "rank": RANK, "case": of.name}
    row["rounds"] = len(rounds)
    for name in PROGRAMS:
        row |= {f"{name}_{key}": statistics.median(one[name][key] for one in rounds) for key in ("step_s", "wall_s")}
        row[f"{name}_peak_bytes"] = max(one[name]["peak_bytes"] for one in rounds)
    row["ratio"] = statistics.median(one["peer"]["step_s"] / one["ours"]["step_s"] for one in rounds)
    row |= {"memory_share": row["ours_peak_bytes"] / row["full_peak_bytes"], "promised": MEMORY}
    smaller = row["memory_share"] <= MEMORY and row["ours_peak_bytes"] < row["peer_peak_bytes"]
    return row | {"ok": smaller and row["ratio"] > 1}


def show(row: Mapping) -> str:
    told = (f"{one} {row[f'{one}_step_s']:.1f} s, {row[f'{one}_peak_bytes'] / 2**30:.2f} GiB" for one in PROGRAMS)
    verdict = "" if row["ok"] else "  NOT AS PROMISED"
    return f"{row['case']}: {row['memory_share']:.2f} of the memory of all weights{verdict}\n  {'; '.join(told)}"
