"""Do jobs that have finished always end with status 0? Launches beside four busy processes.

Two kinds at 4 and 8 ranks: `tests`, the runner of the tests with one test that needs no torch, to which one rank comes
1.5 s late and after which rank 0 ends 4 s later than the others; and `train`, the program with one iteration of the
embedded model. A launch has ended well if its status is 0 and rank 0 has written its last line. Rows are appended,
so that the launches can be made in parts.

Cost: one to two hours for 100 launches of each. Command: python -m bench endings [LAUNCHES] [tests|train]
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.busy import busy
from bench.rows import REPOSITORY, add
from bench.tables import text_table

LAUNCHES, RANKS, LOAD = 100, (4, 8), 4
LIMIT_S = 300.0
SMALL = ("iterations=1", "rollout_batch=16", "mini_batch=8")
TEST = """
import time
import pytest
from mpi4py import MPI
from rlhf_spmd.runtime.world.world import World

@pytest.mark.mpi
def test_nothing():
    time.sleep(1.5 if MPI.COMM_WORLD.rank == {late} else 0)  # the others call the roll
    world = World.discover(deadline_s=60)
    world.shutdown()
    time.sleep(4.0 if world.rank == 0 else 0)  # it has the last word
"""


def main(arguments: list[str]) -> int:
    launches = int(arguments[0]) if arguments else LAUNCHES
    rows = []
    with tempfile.TemporaryDirectory(prefix="endings_") as name, busy(LOAD):
        for kind in arguments[1:] or ("tests", "train"):
            for num_ranks in RANKS:
                rows.append(measure(kind, num_ranks, launches, Path(name)))
                add("endings", rows[-1:])
    print(text_table("endings", rows))
    failed = sum(row["failed"] for row in rows)
    print(json.dumps({"bench": "endings", "launches": launches * len(rows), "failed": failed, "ok": not failed}))
    return 1 if failed else 0


def measure(kind: str, num_ranks: int, launches: int, folder: Path) -> dict:
    began, failed = time.monotonic(), 0
    for number in range(launches):
        status, out = launch(kind, num_ranks, number % num_ranks, folder / f"{kind}-{num_ranks}-{number}")
        if status != 0 or not out.strip().endswith("1 passed, 0 failed" if kind == "tests" else "}"):
            failed += 1
            print(f"{kind} at {num_ranks} ranks, launch {number}: status {status}\n{out[-2000:]}", flush=True)
    row = {"bench": "endings", "kind": kind, "ranks": num_ranks, "load": LOAD, "launches": launches, "failed": failed}
    row["seconds"] = (time.monotonic() - began) / launches
    print(f"{kind} at {num_ranks} ranks: {failed} of {launches} failed, {row['seconds']:.1f} s each", flush=True)
    return row


def launch(kind: str, num_ranks: int, late: int, folder: Path) -> tuple[int | None, str]:
    """Exit status (None: it hung) and output."""
    if kind == "tests":
        folder.mkdir()
        (folder / "test_nothing.py").write_text(TEST.format(late=late), encoding="utf-8")
        options = ["--limit", str(LIMIT_S), "--", "-c", "/dev/null", "--rootdir", folder, folder / "test_nothing.py"]
        command = [sys.executable, "tests/run_mpi.py", num_ranks, *options]
    else:
        mpirun = Path(sys.executable).with_name("mpirun")
        options = ["train", *SMALL, "--runs", folder.parent, "--name", folder.name]
        command = [mpirun, "-n", num_ranks, sys.executable, "-m", "rlhf_spmd", *options]
    try:
        done = subprocess.run(
            [str(word) for word in command],
            cwd=REPOSITORY,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=LIMIT_S + 30,
        )
    except subprocess.TimeoutExpired as expired:
        return None, (expired.stdout or b"").decode(errors="replace")
    return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr
