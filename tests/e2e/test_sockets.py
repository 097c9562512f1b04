"""Listening sockets while a job runs on one machine: the program listens on loopback only."""

import sys

from tests.run_mpi import mpi_command, mpi_environment, run_limited

PROGRAM = """
import psutil

def listening():
    found = psutil.Process().net_connections(kind="inet")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}

launchers = listening()  # mpiexec's own, which its children inherit

from rlhf_spmd.runtime.world.world import World
world = World.discover()
world.start_torch({"all": range(3), "two": range(2)}, threads=1)
import torch
torch.distributed.all_reduce(torch.ones(1), group=world.group("all"))
addresses = sorted({address for address, _ in listening() - launchers})
everywhere = world.allgather(addresses)
if world.rank == 0:
    print(everywhere)
world.shutdown()
"""


def test_one_machine_listens_on_loopback_only():
    command = [*mpi_command(3), sys.executable, "-c", PROGRAM]
    status, out, err = run_limited(command, limit_s=60.0, environment=mpi_environment())
    assert (status, out) == (0, f"{[['127.0.0.1']] * 3}\n"), (out, err)
