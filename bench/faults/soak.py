"""A long run with a kill about every fifty iterations: does it end like an undisturbed run, is memory flat?

500 iterations of the embedded model on four ranks. One run is undisturbed. Of the other a random rank is killed with
SIGKILL after 30 to 70 more iterations, again and again, and it is resumed each time. Both must leave the same bits
(metrics but for times, weights, moments, responses). Memory is what the ranks of the undisturbed run have resident,
together: the most in its last tenth against the most in its second.

Cost: six minutes. Command: python -m bench soak
"""

import os
import random
import signal
import tempfile
import time
from pathlib import Path

from bench.rows import Arguments, write
from bench.tables import ended
from tests.started import Started, num_iterations, outcome

STRATEGY, NUM_RANKS, ITERATIONS = "separation", 4, 500
BETWEEN = (30, 70)  # iterations from one kill to the next
EVERY = 10  # iterations between checkpoints
SMALL = ("rollout_batch=32", "mini_batch=16")
MOST_GROWTH = 0.02
TICK_S, LIMIT_S = 0.5, 1800.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def main(arguments: list[str]) -> int:
    Arguments("soak", __doc__).parse_args(arguments)
    options = ["--strategy", STRATEGY, f"iterations={ITERATIONS}", f"checkpoint.every={EVERY}", *SMALL]
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        alone = Started(NUM_RANKS, Path(folder) / "alone", *options)
        began = time.monotonic()
        memory = watched(alone, ITERATIONS)
        status, stderr = alone.end()
        assert status == 0, stderr
        row = {"bench": "soak", "strategy": STRATEGY, "ranks": NUM_RANKS, "iterations": ITERATIONS}
        row |= {"alone_s": time.monotonic() - began, **growth(memory)}
        began = time.monotonic()
        row |= disturbed(options, Path(folder) / "disturbed", outcome(alone.folder))
        row["disturbed_s"] = time.monotonic() - began
    row["ok"] = row["equal"] and row["named"] == row["kills"] and not row["hangs"] and not row["orphans"]
    row["ok"] = row["ok"] and row["growth"] <= MOST_GROWTH
    write("soak", [row])
    return ended("soak", [row], **{name: row[name] for name in ("kills", "equal", "growth")})


def disturbed(options: list[str], folder: Path, expected: dict) -> dict:
    """Kills and resumes a run until it is done."""
    dice, found = random.Random("soak"), {"kills": 0, "named": 0, "hangs": 0, "orphans": 0}
    started, after = Started(NUM_RANKS, folder, *options), 0
    while True:
        after += dice.randint(*BETWEEN)
        watched(started, min(after, ITERATIONS))
        ranks = started.ranks() if after < ITERATIONS else {}
        pid = dice.choice(sorted(ranks)) if ranks else None
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        status, stderr = started.end()
        found["hangs"] += status is None
        found["orphans"] += started.num_left()
        if pid is None:
            return found | {"equal": status == 0 and outcome(folder) == expected}
        found["kills"] += 1
        found["named"] += f"rank {ranks[pid]}" in stderr
        print(f"killed rank {ranks[pid]} after {num_iterations(folder)} iterations", flush=True)
        started = Started(NUM_RANKS, folder, "--resume")


def watched(run: Started, iterations: int) -> list[tuple[int, int]]:
    """Returns when so many iterations are done or the run has ended: iterations done and bytes resident, again and
    again."""
    found, end = [], time.monotonic() + LIMIT_S
    while run.process.poll() is None and time.monotonic() < end and num_iterations(run.folder) < iterations:
        found.append((num_iterations(run.folder), sum(map(resident_bytes, run.ranks()))))
        time.sleep(TICK_S)
    return found


def resident_bytes(pid: int) -> int:
    """Returns the resident bytes of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def growth(memory: list[tuple[int, int]]) -> dict:
    """Returns the most bytes in the second and in the last tenth of a run, and by which share they grew."""

    def largest(tenth: int) -> int:
        low, high = tenth * ITERATIONS // 10, (tenth + 1) * ITERATIONS // 10
        return max(num_bytes for done, num_bytes in memory if low <= done < high)

    first, last = largest(1), largest(9)
    return {"first_bytes": first, "last_bytes": last, "growth": last / first - 1}
