"""What `make test` runs: unit and e2e tests on all cores and, beside them, the tests that need several ranks.

    python -m tests.run_all            # everything but what is marked slow
    python -m tests.run_all --slow     # only what is marked slow
    python -m tests.run_all --busy     # what is marked timed, and searches, beside six busy processes
    python -m tests.run_all unit       # one part: unit (with e2e) or mpi

Ranks wait for each other a third of the time, in which the unit tests have the cores. What the several ranks print
comes after the unit tests. Ends with the slowest tests, the seconds in all and what they are allowed to be.
"""

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path

from tests import durations, warm
from tests.busy import busy
from tests.run_mpi import REPOSITORY, with_bytecode

PARTS = ("unit", "mpi")
LONG = [
    f"tests/unit/{name}.py"
    for name in (
        "plan/search/test_planner",
        "kernels/test_sample_kernel",
        "bench/test_scan",
        "kernels/test_kernels_compile",
        "kernels/test_support",
    )
]
SLOW_LIMIT_S = 3600  # for one slow test
MOST_MINUTES, MOST_PROCESSOR_S = 15, 1700  # of all parts without --slow, on two cores with nothing beside them
NUM_BUSY, MOST_BUSY_MINUTES = 6, 10  # processes beside all parts with --busy, and what these may take
SEARCHES = "test_misfit or no_clock_decides"  # beside the mark: seconds once stopped these


def command(part: str, *, slow: bool = False, busy: bool = False) -> list[str]:
    """Returns the command line of one part."""
    marked = ["-m", "slow" if slow else "not slow"]
    if part == "mpi":
        timed = ["2", "--", "-m", "timed and not slow", "tests/mpi"] if busy else []
        return [sys.executable, "tests/run_mpi.py", *(["--slow"] if slow else timed)]
    # A file's tests share fixtures, so a file stays with one worker; the longest files come first.
    workers = ["-n", str(os.cpu_count() or 1), "--dist", "loadfile", "--no-loadscope-reorder"]
    # A worker whose test hangs ends (setup.cfg); a new one starts with the same test, so one restart is enough.
    hangs = ["--max-worker-restart", "1", *(["-o", f"faulthandler_timeout={SLOW_LIMIT_S}"] if slow else [])]
    pytest = [sys.executable, "-m", "pytest", *workers, *hangs, "-p", "tests.durations"]
    if busy:
        return [*pytest, *marked, "-k", f"timed or {SEARCHES}", *busy_files()]
    return [*pytest, *marked, "tests/e2e", *LONG, "tests/unit", "tests/gpu"]


def busy_files() -> list[str]:
    """Returns the files with tests for --busy: to collect all others takes minutes there."""
    files = sorted(path.relative_to(REPOSITORY) for path in (REPOSITORY / "tests" / "unit").rglob("test_*.py"))
    searches = {"test_misfit", "test_planner"}
    return [
        str(path)
        for path in files
        if path.stem in searches or "mark.timed" in (REPOSITORY / path).read_text(encoding="utf-8")
    ]


def run_parts(words: Mapping[str, Sequence[str]], environment: Mapping[str, str], log: Path) -> list[str]:
    """Runs the command lines of the parts at once -> the parts that failed.

    log: a file for what "mpi" prints while "unit" runs.
    """
    statuses = {}
    with ExitStack() as stack:
        if "mpi" in words:
            output = stack.enter_context(log.open("wb"))
            mpi = subprocess.Popen(words["mpi"], cwd=REPOSITORY, env=environment, stdout=output, stderr=output)
            stack.callback(mpi.send_signal, signal.SIGINT)  # at an error here; nothing once it has ended
        if "unit" in words:
            shared = stack.enter_context(closing(warm.Warm()))
            own = {"OMP_NUM_THREADS": "1", warm.ADDRESS: shared.address}
            statuses["unit"] = subprocess.run(words["unit"], cwd=REPOSITORY, env=environment | own).returncode
        if "mpi" in words:
            with log.open("rb") as printed:
                while mpi.poll() is None or printed.peek(1):
                    sys.stdout.buffer.write(printed.read())
                    sys.stdout.buffer.flush()
                    time.sleep(0.5)
            statuses["mpi"] = mpi.returncode
    return [part for part, status in statuses.items() if status]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="unit or mpi (default: both)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--slow", action="store_true", help="the tests that are marked slow instead of all others")
    which.add_argument("--busy", action="store_true", help="what is marked timed, and searches, on a busy machine")
    options = parser.parse_args()
    parts = options.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {min(unknown)!r}; the parts are {' and '.join(PARTS)}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="run_all_") as folder:
        file = Path(folder) / "durations.jsonl"
        environment = {**with_bytecode(), durations.FILE: str(file)}
        with busy(NUM_BUSY) if options.busy else nullcontext():
            words = {part: command(part, slow=options.slow, busy=options.busy) for part in parts}
            failed = run_parts(words, environment, Path(folder) / "mpi.log")
        print(*durations.summary(file), sep="\n")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    minutes, processor_s = (time.monotonic() - began) / 60, used.ru_utime + used.ru_stime
    allowed = "" if options.slow else f" (at most {MOST_MINUTES} and {MOST_PROCESSOR_S} on two idle cores)"
    allowed = f" (at most {MOST_BUSY_MINUTES} minutes; the busy ones count as well)" if options.busy else allowed
    print(f"in all {minutes:.1f} minutes and {processor_s:.0f} processor seconds{allowed}")
    print(f"failed: {', '.join(failed)}" if failed else "all parts passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
