"""How jobs that have finished end: every rank with its last words, and mpiexec with status 0. 15 s."""

import sys

import pytest

from tests.run_mpi import mpi_command, mpi_environment, run_limited

LIMIT_S = 60.0

PROGRAM = """
import os, time
from mpi4py import MPI  # its start waits for all ranks; what comes between that and their first meeting does not
from rlhf_spmd.runtime.world.world import World

time.sleep(1.5 if MPI.COMM_WORLD.rank == {late} else 0)  # longer than it takes the others to call the roll
world = World.discover(deadline_s=20)
try:
    {body}
    world.shutdown()
    {end}
except BaseException as error:
    world.fail(error)
time.sleep(1.0 if world.rank == 0 else 0)
os.write(1, f"rank {{world.rank}} is done\\n".encode())  # in one piece: the ranks share a pipe
"""


def run(late: int, *, body: str = "pass", end: str = "world.finalize()", num_ranks: int = 4) -> tuple[int, str, str]:
    """Returns status, stdout and stderr of a job to whose first meeting rank `late` comes late, and whose rank 0 ends
    last."""
    program = [sys.executable, "-c", PROGRAM.format(late=late, body=body, end=end)]
    status, out, err = run_limited([*mpi_command(num_ranks), *program], limit_s=LIMIT_S, environment=mpi_environment())
    assert status is not None, f"still running after {LIMIT_S} s\n{out}\n{err}"
    return status, out, err


@pytest.mark.parametrize(
    ("late", "end"),
    [
        pytest.param(3, "world.finalize()", id="finalized-3"),
        pytest.param(0, "pass", id="by mpi4py at the exit-0"),
        pytest.param(0, "world.finalize()", id="finalized-0", marks=pytest.mark.slow),
        pytest.param(3, "pass", id="by mpi4py at the exit-3", marks=pytest.mark.slow),
    ],
)
def test_a_late_rank_does_not_spoil_the_end(late, end):
    """Roll calls that nobody had received once made MPI_Finalize fail, and mpiexec kill whoever was still there."""
    status, out, err = run(late, end=end)
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == [f"rank {rank} is done" for rank in range(4)]


@pytest.mark.skipif(mpi_command(1)[1] != "-n", reason="only MPICH minds messages that are left")
def test_an_mpi_that_cannot_end_says_so():
    body = "if world.rank == 1: MPI.COMM_WORLD.Isend([bytes(8), 'B'], dest=2)  # nobody receives it"
    status, _, err = run(3, body=body)
    assert status != 0 and err.count("MPI_Finalize failed") == 1 and "rank 2 " in err, err
