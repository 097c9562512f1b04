"""`bench rehearse`: every shipped strategy and the planner's plan of a job for 8x8 GPUs, rehearsed on this machine.

A row for each: forecast and rehearsed seconds of an iteration, the processors' share, the memory of all processes. Ok
means that nothing hung, the median of the iterations is within 10% of the forecast, the whole took at most 90 s and
6 GB, and the ranks took at most 60% of the cores. Needs an otherwise idle machine.

Cost: ten minutes on two cores. Command: python -m bench rehearse [STRATEGY ...] [--device-type h100-80g]
"""

import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from bench.forecast.own_ideas import add_machine, calibration_of
from bench.rows import SHIPPED, Arguments, add, run
from bench.tables import ended

JOB, CALIBRATION = ("--layout", "8x8", "--preset", "llama-13b"), "a100-80g"
NEAR, MOST_S, MOST_BYTES, MOST_SHARE = 0.1, 90.0, 6e9, 0.6
SAMPLE_S = 2.0
PLAN = "plan"


def main(arguments: list[str]) -> int:
    parser = Arguments("rehearse", __doc__)
    parser.add_argument("strategies", nargs="*", metavar="STRATEGY", help=f"none: {', '.join(SHIPPED)} and {PLAN}")
    add_machine(parser)
    parsed = parser.parse_args(arguments)
    job = [*JOB, "--calibration", calibration_of(parsed, CALIBRATION)]
    rows = []
    with tempfile.TemporaryDirectory(prefix="rehearse_") as name:
        for strategy in parsed.strategies or (*SHIPPED, PLAN):
            rows.append(measured(strategy, Path(name), job))
            add("rehearse", rows[-1:])
    return ended("rehearse", rows)


def measured(strategy: str, folder: Path, job: Sequence[str]) -> dict:
    """Measures the row of one strategy."""
    source = strategy
    if strategy == PLAN:
        source = str(folder / "plan.py")
        run(1, ["plan", *job, "--json", "--out", source])
    began, memory = time.monotonic(), Memory()
    result = run(1, ["rehearse", source, *job, "--json"])
    took_s, peak = time.monotonic() - began, memory.stop()
    seconds = sorted(result["rehearsed_s"])
    error = seconds[len(seconds) // 2] / result["forecast_s"] - 1
    row = {
        "bench": "rehearse",
        "strategy": strategy,
        "preset": result["preset"],
        "layout": result["layout"],
        "forecast_s": result["forecast_s"],
        "rehearsed_s": seconds,
        "error": error,
        "processor_share": result["processor_share"],
        "peak_bytes": peak,
        "seconds": took_s,
    }
    small = took_s <= MOST_S and peak <= MOST_BYTES and result["processor_share"] <= MOST_SHARE
    return row | {"ok": small and abs(error) <= NEAR}


class Memory:
    """Samples the bytes of all processes of this bench, pages that several share counted once."""

    def __init__(self) -> None:
        self.most, self.over = 0, threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()

    def _sample(self) -> None:
        import psutil

        while not self.over.wait(SAMPLE_S):
            used = 0
            for process in psutil.Process().children(recursive=True):
                try:
                    used += process.memory_full_info().pss
                except psutil.Error:  # it has ended
                    continue
            self.most = max(self.most, used)

    def stop(self) -> int:
        """Stops the measurement. Returns the most bytes that were seen."""
        self.over.set()
        self.thread.join()
        return self.most
