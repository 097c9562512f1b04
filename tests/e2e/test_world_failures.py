"""Jobs that must end: every kind of failure gives one message, a status other than zero, and an end within seconds.

Each test starts ranks with mpiexec, most of them without torch (half a second); 40 s in all on two cores.
"""

import os
import sys
import time

import pytest

from tests.run_mpi import environment_alone, mpi_command, mpi_environment, run_limited

LIMIT_S = 60.0
PREFIX = "rlhf_spmd: error: "

PROGRAM = """
import os, signal, sys, time
from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.world.world import World

def main(world):
{body}

try:
    world = World.discover(deadline_s={deadline_s})
except UserError as error:
    sys.exit(f"rlhf_spmd: error: {{error}}")
try:
    main(world)
    world.shutdown()
except BaseException as error:
    world.fail(error)
"""


def run(num_ranks, body, *, deadline_s=20.0, limit_s=LIMIT_S, **environment):
    """Runs `body` as the main function of every rank; returns status, stdout and stderr."""
    indented = "\n".join("    " + line for line in body.strip().splitlines())
    program = [sys.executable, "-c", PROGRAM.format(body=indented, deadline_s=deadline_s)]
    status, out, err = run_limited(
        [*mpi_command(num_ranks), *program], limit_s=limit_s, environment=mpi_environment(**environment)
    )
    assert status is not None, f"still running after {limit_s} s\n{out}\n{err}"
    return status, out, err


def the_message(err):
    """Returns the only message of ours in stderr; under MPICH there is nothing else (Open MPI's mpiexec adds its
    comment)."""
    assert err.count(PREFIX) == 1, err
    assert "Traceback" not in err, err
    if "mpiexec.hydra" in os.path.realpath(mpi_command(1)[0]):
        assert err.startswith(PREFIX), err
        return err.removeprefix(PREFIX).rstrip("\n")
    return next(line for line in err.splitlines() if line.startswith(PREFIX)).removeprefix(PREFIX)


def test_a_mistake_on_every_rank_is_told_once():
    status, _, err = run(
        4,
        """
with world.together("reading the configuration"):
    raise UserError("no such file: a.json")
""",
    )
    assert status == 2 and the_message(err) == "no such file: a.json"


@pytest.mark.parametrize("num_failing", [1, 4])
def test_a_mistake_in_the_middle_ends_ranks_that_are_busy(num_failing):
    status, _, err = run(
        4,
        f"""
if world.rank >= 4 - {num_failing}:
    raise UserError("the disk is full")
time.sleep(300)
""",
    )
    message = the_message(err)
    assert status == 2 and message.startswith("the disk is full (reported by rank ")


def test_a_mistake_in_the_middle_ends_ranks_that_are_blocked_in_torch():
    status, out, err = run(
        3,
        """
world.use_device("cpu")
world.start_torch({"all": range(3)}, deadline_s=300, threads=1)
import torch
torch.distributed.all_reduce(torch.ones(1), group=world.group("all"))
if world.rank == 2:
    time.sleep(0.5)
    print(time.time(), flush=True)
    raise UserError("the disk is full")
torch.distributed.all_reduce(torch.ones(1), group=world.group("all"))
""",
    )
    assert status == 2 and the_message(err).startswith("the disk is full (reported by rank 2 (host ")
    assert time.time() - float(out.split()[-1]) < 30


def test_an_interrupted_rank_is_named():
    status, _, err = run(
        3,
        """
if world.rank == 1:
    world.progress("iteration 3: train actor", 3, 4)
    os.kill(os.getpid(), signal.SIGINT)
time.sleep(300)
""",
    )
    assert status == 130
    assert the_message(err).startswith("interrupted by SIGINT (reported by rank 1 (host "), err
    assert "in iteration 3: train actor" in err


@pytest.mark.parametrize("how", ["time.sleep(300)", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_ranks_that_never_come_are_named(how):
    status, _, err = run(
        4,
        f"""
if world.rank in (1, 2):
    world.progress("iteration 3: train actor")
    {how}
world.barrier("the decision to stop")
""",
        deadline_s=1.5,
    )
    message = the_message(err)
    assert status == 2
    assert message.startswith("the decision to stop: rank ") and "but ranks 1, 2 (host " in message
    assert (
        "rank 1 last reported: iteration 3: train actor" in err
        and "rank 2 last reported: iteration 3: train actor" in err
    )


# Starts that can't work


def run_alone(**environment):
    """Starts the program without mpiexec, as a launcher of another MPI would start each of its processes."""
    program = [sys.executable, "-c", PROGRAM.format(body="    print(world.size)", deadline_s=5)]
    return run_limited(program, limit_s=LIMIT_S, environment=environment_alone(**environment))


def test_a_start_in_which_every_process_is_alone_is_refused():
    step = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}
    status, out, err = run_alone(**step, SLURM_PROCID="0")
    assert status != 0 and out == "" and "4 processes were started" in the_message(err)
    assert "srun --mpi=pmi2" in err
    assert run_alone(SLURM_NTASKS="4", SLURM_PROCID="0") == (0, "1\n", "")  # a batch script, not a step


@pytest.mark.parametrize("alone", [True, False])
def test_a_missing_mpi_library_is_told_once(alone):
    missing = {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}
    status, out, err = run_alone(**missing) if alone else run(3, "pass", **missing)
    assert status != 0 and out == ""
    message = the_message(err)
    assert message.startswith("no MPI library can be loaded on ") and "pip install mpi4py mpich" in message
