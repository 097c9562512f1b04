"""What `make test` runs: unit and e2e tests on all cores, then the tests that need several ranks.

    python -m tests.run_all            # everything but what is marked slow
    python -m tests.run_all --slow     # only what is marked slow
    python -m tests.run_all --busy     # what is marked timed, and searches, beside six busy processes
    python -m tests.run_all unit       # one part: unit (with e2e) or mpi

Each part ends with its slowest tests, all with the seconds and what they are allowed to be.
"""

import argparse
import glob
import os
import resource
import shlex
import subprocess
import sys
import time
from contextlib import closing, nullcontext

from tests.busy import busy
from tests.run_mpi import REPOSITORY, with_bytecode
from tests.warm import ADDRESS, IMPORTS, PROGRAM, Warm

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
FORKED = (*IMPORTS, "pytest", PROGRAM)  # of the workers, and of the program in their tests
DRIVERS = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")  # of NVIDIA, AMD and WSL
SLOW_LIMIT_S = 3600  # for one slow test
MOST_MINUTES, MOST_PROCESSOR_S = 15, 1500  # of all parts without --slow, on two cores with nothing beside them
NUM_BUSY, MOST_BUSY_MINUTES = 6, 10  # processes beside all parts with --busy, and what these may take
SEARCHES = "test_misfit or no_clock_decides"  # beside the mark: seconds once stopped these


def command(part: str, forks: Warm | None = None, *, slow: bool = False, busy: bool = False) -> list[str]:
    """Returns the command line of one part.

    forks: whose forks become pytest's workers where there is no GPU, which a fork cannot use.
    """
    marked = ["-m", "slow" if slow else "not slow"]
    if part == "mpi":
        timed = ["2", "--", "-m", "timed and not slow", "tests/mpi"] if busy else []
        return [sys.executable, "tests/run_mpi.py", *(["--slow"] if slow else timed)]
    # A file's tests share fixtures, so a file stays with one worker; the longest files come first. Some tests wait,
    # so there is one worker more than cores.
    number, start = (os.cpu_count() or 1) + 1, ""
    if forks and not any(glob.glob(pattern) for pattern in DRIVERS):
        start = f"//python={shlex.join(forks.command())}"
    workers = ["--tx", f"{number}*popen{start}", "--dist", "loadfile", "--no-loadscope-reorder"]
    # A worker whose test hangs ends (setup.cfg); a new one starts with the same test, so one restart is enough.
    hangs = ["--max-worker-restart", "1", *(["-o", f"faulthandler_timeout={SLOW_LIMIT_S}"] if slow else [])]
    told = ["--durations=10", "--durations-min=5", "-W", "ignore:Module already imported"]  # before the fork
    pytest = [sys.executable, "-m", "pytest", *workers, *hangs, *told]
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
    environment, failed = with_bytecode(), []
    with busy(NUM_BUSY) if options.busy else nullcontext():
        for part in parts:
            with closing(Warm(main="tests.warm", imports=FORKED)) if part == "unit" else nullcontext() as forks:
                words = command(part, forks, slow=options.slow, busy=options.busy)
                own = {"OMP_NUM_THREADS": "1", ADDRESS: forks.address} if forks else {}
                if subprocess.run(words, cwd=REPOSITORY, env=environment | own).returncode:
                    failed.append(part)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    minutes, processor_s = (time.monotonic() - began) / 60, used.ru_utime + used.ru_stime
    allowed = "" if options.slow else f" (at most {MOST_MINUTES} and {MOST_PROCESSOR_S} on two idle cores)"
    allowed = f" (at most {MOST_BUSY_MINUTES} minutes; the busy ones count as well)" if options.busy else allowed
    print(f"in all {minutes:.1f} minutes and {processor_s:.0f} processor seconds{allowed}")
    print(f"failed: {', '.join(failed)}" if failed else "all parts passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
