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


ON_EVERY_RANK = """
with world.together("reading the configuration"):
    raise UserError("no such file: a.json")
"""
ON_SOME = """
if world.rank >= 4 - {}:
    raise UserError("the disk is full")
time.sleep(300)
"""
IN_TORCH = """
world.use_device("cpu")
world.start_torch({"all": range(3)}, deadline_s=300, threads=1)
import torch
torch.distributed.all_reduce(torch.ones(1), group=world.group("all"))
if world.rank == 2:
    time.sleep(0.5)
    print(time.time(), flush=True)
    raise UserError("the disk is full")
torch.distributed.all_reduce(torch.ones(1), group=world.group("all"))
"""
INTERRUPTED = """
if world.rank == 1:
    world.progress("iteration 3: train actor", 3, 4)
    os.kill(os.getpid(), signal.SIGINT)
time.sleep(300)
"""
AWAY = """
if world.rank in (1, 2):
    world.progress("iteration 3: train actor")
    {}
world.barrier("the decision to stop")
"""
LAST = [f"rank {rank} last reported: iteration 3: train actor" for rank in (1, 2)]


def test_a_mistake_on_every_rank_is_told_once():
    status, _, err = run(4, ON_EVERY_RANK)
    assert status == 2 and the_message(err) == "no such file: a.json"


@pytest.mark.parametrize(
    ("num_ranks", "body", "ended", "says"),
    [
        (4, ON_SOME.format(1), 2, ["the disk is full (reported by rank "]),
        (4, ON_SOME.format(4), 2, ["the disk is full (reported by rank "]),
        (3, IN_TORCH, 2, ["the disk is full (reported by rank 2 (host "]),
        (3, INTERRUPTED, 130, ["interrupted by SIGINT (reported by rank 1 (host ", "in iteration 3: train actor"]),
        *(
            (
                4,
                AWAY.format(how),
                2,
                ["the decision to stop: rank ", "but ranks 1, 2 (host ", *LAST],
            )
            for how in ("time.sleep(300)", "os.kill(os.getpid(), signal.SIGSTOP)")
        ),
    ],
)
def test_a_job_ends_with_one_message(num_ranks, body, ended, says):
    """Ranks that are busy, blocked in torch, interrupted, or never come."""
    status, out, err = run(num_ranks, body, deadline_s=1.5 if "decision" in body else 20.0)
    assert status == ended and the_message(err).startswith(says[0]), err
    for words in says[1:]:
        assert words in err, err
    assert not out or time.time() - float(out.split()[-1]) < 30


# Starts that can't work


def run_alone(**environment):
    """Starts the program without mpiexec, as a launcher of another MPI would start each of its processes."""
    program = [sys.executable, "-c", PROGRAM.format(body="    print(world.size)", deadline_s=5)]
    return run_limited(program, limit_s=LIMIT_S, environment=environment_alone(**environment))


@pytest.mark.parametrize("alone", [True, False])
def test_a_missing_mpi_library_is_told_once(alone):
    missing = {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}
    status, out, err = run_alone(**missing) if alone else run(3, "pass", **missing)
    assert status != 0 and out == ""
    message = the_message(err)
    assert message.startswith("no MPI library can be loaded on ") and "pip install mpi4py mpich" in message
