"""Runs the tests that need several ranks: one launch of mpiexec for each number of ranks, each with a time limit.

    python tests/run_mpi.py                      # tests/mpi at 2, 4 and 8 ranks, but what is marked slow; then some
                                                 # on a stand-in for NCCL, at 4 ranks
    python tests/run_mpi.py --slow               # only what is marked slow, also at 5 ranks; then all on the stand-in
    python tests/run_mpi.py 4 -- tests/mpi/test_world.py -k deadline
    python tests/run_mpi.py --backend ordered 4  # all tests on the stand-in (tests/backends.py)

Shows rank 0's pytest; what the other ranks wrote appears only if something failed. Fails if any rank failed, if a
launch ran into its limit (all its processes are then killed), or if it passed no test at all. Starting up costs four
processor seconds of imports per rank, so all files run in one launch, and in `make test` all ranks are forks of two
processes that have imported all (tests/warm.py); with --slow they start as a user's. Works with MPICH and Open MPI.

Runs on one rank that tests of several launches compare with are made once, in the folder that `references()` names.
`mpi_command(n)` and `run_limited(command)` serve the tests that launch the program itself.
"""

import argparse
import functools
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
NUM_RANKS, SLOW_RANKS = (2, 4, 8), (2, 4, 5, 8)
IMPORTS = ("pytest", "deepspeed", "torch._inductor.compile_fx", "networkx", "triton.language")  # of forks, with warm's
IN_ORDER = "tests/mpi/test_in_order.py"  # runs on the backends of tests/backends.py only
# backend -> what runs on it at 4 ranks, after the tests on gloo
STAGES = "tests/mpi/test_zero_stages.py"
QUICK = {
    "ordered": ["-m", "not slow", IN_ORDER, f"{STAGES}::test_sums_of_two_nodes", f"{STAGES}::test_stages_and_buckets"]
}
SLOW = {"ordered": ["tests/mpi"], "host": [IN_ORDER]}
LIMIT_S = 2400.0
GRACE_S = 10.0  # mpiexec gets so long to end its ranks before all are killed
TAIL_LINES, FEW_LINES = 60, 15
LAUNCHER_MARKS = ("PMI", "OMPI_", "PRTE", "SLURM_", "MPI_LOCAL", "HYDRA")  # how variables of launchers begin
BACKEND = "TEST_BACKEND"  # the environment variable with the backend that tests/mpi runs on instead of gloo
REFERENCES = "TEST_REFERENCES"  # the environment variable with the folder of `references()`


@functools.cache
def _mpiexec() -> tuple[str, ...]:
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise SystemExit("run_mpi: no mpiexec beside this python nor on PATH: `pip install mpich`")
    version = subprocess.run([mpiexec, "--version"], capture_output=True, encoding="utf-8").stdout
    if "Open MPI" not in version and "prte" not in version.lower():
        return (mpiexec,)
    options = [
        "--oversubscribe",
        "--bind-to",
        "none",
        "--mca",
        "btl",
        "^ofi",
    ]  # without btl/ofi it starts a second sooner
    return (mpiexec, *(["--allow-run-as-root"] if os.geteuid() == 0 else []), *options)


def mpi_command(num_ranks: int) -> list[str]:
    """Returns the beginning of a command that starts `num_ranks` ranks on this machine, more than its cores if need be.

    RUN_MPI_LAUNCHER takes its place in a batch job, whose number of ranks it knows: `srun --mpi=pmi2`.
    """
    if launcher := os.environ.get("RUN_MPI_LAUNCHER"):
        return launcher.split()
    return [*_mpiexec(), "-n", str(num_ranks)]


def mpi_environment(**more: str) -> dict[str, str]:
    """Returns this process's environment, made fit for many ranks on few cores, none of which looks for a GPU."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**with_bytecode(), **own, **more}


def with_bytecode() -> dict[str, str]:
    """Returns this process's environment without PYTHONDONTWRITEBYTECODE, which container images often set: the
    hundreds of processes of the tests share their bytecode."""
    return {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def environment_alone(**more: str) -> dict[str, str]:
    """Returns the environment of `mpi_environment` for a process that no launcher has started."""
    return {name: text for name, text in mpi_environment().items() if not name.startswith(LAUNCHER_MARKS)} | more


def run_limited(
    command: Sequence[str],
    *,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    capture: bool = True,
) -> tuple[int | None, str, str]:
    """Runs a command and returns (status, stdout, stderr); the status is None if it had to be stopped at the limit.

    No process outlives it: mpiexec is asked first, since its ranks are in process groups of their own.
    """
    pipe = subprocess.PIPE if capture else None
    process = subprocess.Popen(
        command, env=environment or mpi_environment(), cwd=REPOSITORY, stdout=pipe, stderr=pipe, encoding="utf-8"
    )
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
        return process.returncode, stdout or "", stderr or ""
    except BaseException as error:
        stdout, stderr = stop(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return None, stdout, stderr


def stop(process: subprocess.Popen, *, grace_s: float = GRACE_S) -> tuple[str, str]:
    """Ends a process and all below it, in whatever process groups they are -> what it wrote into pipes."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        stdout, stderr = process.communicate(timeout=grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = "", ""
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    return stdout or "", stderr or ""


class Counter:
    """A pytest plugin that counts outcomes."""

    def __init__(self):
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1

    def pytest_sessionfinish(self, session):
        for plugin in session.config.pluginmanager.get_plugins():
            if hasattr(plugin, "_is_testing_mpi"):  # pytest-mpi would list the MPI library's details
                plugin._is_testing_mpi = False


def references() -> Path | None:
    """Returns a folder that all launches of one call of this script share; None outside such a call."""
    return Path(os.environ[REFERENCES]) if REFERENCES in os.environ else None


def be_a_rank(folder: Path, arguments: Sequence[str]) -> None:
    """Runs pytest in each process of a launch, all ranks but 0 writing to files, and records the outcome."""
    gc.set_threshold(50_000, 20, 50)  # collections during imports find nothing
    import pytest
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    if rank > 0:
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
    sys.path.insert(0, str(REPOSITORY))  # PYTHONSAFEPATH keeps it off
    counter = Counter()
    # no test here uses hypothesis, whose plugin would import it (a quarter of a second); forks have imported others
    own = ["--with-mpi", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-W", "ignore:Module already imported"]
    own += ["--durations=5", "--durations-min=5"]
    status = pytest.main([*own, *arguments], plugins=[counter])
    (folder / f"{rank}.json").write_text(json.dumps({"status": int(status), **counter.counts}), encoding="utf-8")
    sys.stdout.flush()  # exit 0: a bad status would end the other ranks before they have written theirs
    MPI.Finalize()  # nobody leaves before all have written theirs; mpi4py's own at the exit would not tell its errors


def launch(
    num_ranks: int, arguments: Sequence[str], limit_s: float, backend: str | None = None, warm: Any = None
) -> tuple[int, int]:
    """Launches once; returns how many tests passed and failed (at least one if anything was wrong).

    warm: the tests.warm.Warm whose forks the ranks become; None: each starts by itself.
    """
    print(f"--- {num_ranks} ranks" + (f", backend {backend}" if backend else ""), flush=True)
    os.environ.pop(BACKEND, None)
    if backend:
        os.environ[BACKEND] = backend
    with tempfile.TemporaryDirectory(prefix="run_mpi_") as name:
        folder, began = Path(name), time.monotonic()
        plain = [*mpi_command(num_ranks), sys.executable, "-m", "mpi4py"]
        command = warm.command(num_ranks) if warm else plain
        command += [str(Path(__file__).resolve()), "--as-rank", name, "--", *arguments]
        command.append(f"--color={'yes' if sys.stdout.isatty() else 'no'}")  # Open MPI gives rank 0 a terminal
        status, _, _ = run_limited(command, limit_s=limit_s, capture=False)
        results = {}
        for rank in range(num_ranks):
            file = folder / f"{rank}.json"
            results[rank] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
        first = results[0] or {"passed": 0, "failed": 0}
        problems = []
        if status is None:
            problems.append(f"stopped at the limit of {limit_s:g} s")
        lost = [rank for rank, result in results.items() if result is None]
        bad = [rank for rank, result in results.items() if result and result["status"] != 0]
        if status:
            problems.append(f"mpiexec ended with status {status}")
        if lost:
            problems.append(f"ranks {lost} did not finish")
        if bad:
            problems.append(f"pytest failed on ranks {bad}")
        if first["passed"] == 0:
            problems.append("no test passed")
        if problems:
            if 0 in lost or (status and not lost + bad):  # any of the others may have said why
                _show_logs(folder, range(1, num_ranks), FEW_LINES)
            else:  # rank 0 shows the failures of tests that use the fixture `world`; the others mostly say the same
                _show_logs(folder, [rank for rank in (lost if 0 in bad else lost + bad) if rank > 0][:3], TAIL_LINES)
            print(f"--- {num_ranks} ranks: {'; '.join(problems)} ({time.monotonic() - began:.0f} s)", flush=True)
        return first["passed"], max(first["failed"], 1 if problems else 0)


def _show_logs(folder: Path, ranks: Sequence[int], num_lines: int) -> None:
    for rank in ranks:
        log = folder / f"{rank}.log"
        lines = log.read_text(errors="replace", encoding="utf-8").splitlines() if log.exists() else []
        print(f"--- rank {rank} wrote last:", *lines[-num_lines:], sep="\n", flush=True)


def main() -> int:
    own, arguments = sys.argv[1:], []
    if "--" in own:
        split = own.index("--")
        own, arguments = own[:split], own[split + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num_ranks", nargs="*", type=int, help="launch with so many ranks each")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that one launch may take")
    parser.add_argument("--slow", action="store_true", help="the tests that are marked slow instead of all others")
    parser.add_argument("--backend", choices=["ordered", "host"], help="instead of gloo (tests/backends.py)")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(own)
    if options.as_rank:
        be_a_rank(options.as_rank, arguments)
        return 0
    everything = not (arguments or options.backend or options.num_ranks)
    num_ranks = options.num_ranks or (SLOW_RANKS if options.slow else NUM_RANKS)
    more = {} if not everything else SLOW if options.slow else QUICK
    arguments = arguments or ["-m", "slow" if options.slow else "not slow", "tests/mpi"]
    with tempfile.TemporaryDirectory(prefix="references_") as folder, ExitStack() as stack:
        os.environ[REFERENCES] = folder
        warm = None
        if everything and not options.slow:
            sys.path.insert(0, str(REPOSITORY))
            import tests.warm

            warm = tests.warm.Warm(main="mpi4py.run", imports=(*tests.warm.IMPORTS, *IMPORTS), processes=2)
            stack.callback(warm.close)
        totals = [launch(num, arguments, options.limit, options.backend, warm) for num in num_ranks]
        totals += [launch(4, chosen, options.limit, backend, warm) for backend, chosen in more.items()]
    passed, failed = (sum(column) for column in zip(*totals, strict=True))
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
