"""`tools unchanged COMMIT --speed`: does the working tree take more processor time than a commit for the same work?

The work is `bench strategies --quick` (whole runs of the program, start included) and `bench generate --ours` (only our
generation). The working tree and a worktree of the commit take turns: a pair is one run of each, and the order within
it alternates, so that a slow moment of the machine falls on both alike. Processor seconds are those of all processes
that a run has started. The ratio new/old is the median of the pairs, with its interval of at least 95% by the sign test
(order statistics, no assumption about how ratios are distributed). Ok means that the interval excludes a loss of more
than 3%. Work that is not ok is measured once more, and the second verdict counts.

Cost: half an hour on two cores for fifteen pairs, at most twice that.
"""

import math
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

WORKS = {"strategies": ["strategies", "--quick"], "generate": ["generate", "--ours"]}
NUM_PAIRS = 15
MOST = 1.03  # that the upper end of the interval of new/old may reach
CONFIDENCE = 0.95

Run = Callable[[Path, list[str]], object]  # runs `python -m bench ARGUMENTS` in a tree


def processor_s(call: Callable[[], object]) -> float:
    """Returns seconds, user and system, of all child processes that a call starts and waits for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    call()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure(old: Path, new: Path, work: str, run: Run, *, pairs: int = NUM_PAIRS) -> dict:
    """Measures one kind of work and returns its row.

    old, new: the trees. Each runs it once before, which leaves its bytecode.
    """
    seconds: dict[Path, list[float]] = {old: [], new: []}
    began = time.monotonic()
    for tree in (old, new):
        run(tree, WORKS[work])
    for number in range(pairs):
        for tree in (old, new) if number % 2 == 0 else (new, old):
            seconds[tree].append(processor_s(lambda tree=tree: run(tree, WORKS[work])))
    row = {"work": work, "pairs": pairs, "old_s": float(np.median(seconds[old]))}
    row |= {"new_s": float(np.median(seconds[new])), "wall_s": time.monotonic() - began}
    return row | verdict(seconds[old], seconds[new])


def verdict(old_s: Sequence[float], new_s: Sequence[float]) -> dict:
    """Returns ratio new/old of pairs of seconds: its median, its interval, and whether that excludes the loss."""
    ratios = np.sort(np.log(new_s) - np.log(old_s))
    cut = outside(len(ratios))
    low, high = (math.exp(ratios[place]) for place in (cut, len(ratios) - 1 - cut))
    return {"ratio": math.exp(float(np.median(ratios))), "low": low, "high": high, "ok": high <= MOST}


def outside(num: int) -> int:
    """Returns how many of so many sorted numbers lie on either side of an interval of their median: by the sign
    test."""
    below, cut = 0.0, 0
    while 2 * (below := below + math.comb(num, cut) / 2**num) <= 1 - CONFIDENCE:  # chance of `cut` or fewer below it
        cut += 1
    assert cut > 0, f"{num} pairs are too few for an interval of {CONFIDENCE:.0%}"
    return cut - 1


def compare(old: Path, new: Path, run: Run, *, pairs: int = NUM_PAIRS) -> list[dict]:
    """Returns a row for each kind of work; what is not ok is measured again, once."""
    rows = []
    for work in WORKS:
        row = measure(old, new, work, run, pairs=pairs)
        show(row)
        if not row["ok"]:
            print(f"{work}: once more", flush=True)
            row = measure(old, new, work, run, pairs=pairs) | {"first": row}
            show(row)
        rows.append(row)
    return rows


def show(row: dict) -> None:
    """Prints one line for people."""
    seconds = f"{row['old_s']:.1f} s before, {row['new_s']:.1f} s now"
    ratio = f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
    word = "ok" if row["ok"] else f"NOT ok, may be above {MOST:g}"
    print(f"{row['work']}: {seconds} of processors, ratio {ratio}: {word}; {row['wall_s']:.0f} s", flush=True)
