"""What other users of the machine can reach while a job runs on it: no store, and no port but those of loopback."""

import json
import sys

from tests.run_mpi import mpi_command, mpi_environment, run_limited

PROGRAM = """
import json
import os
import subprocess

import psutil

def listening():
    found = psutil.Process().net_connections(kind="inet")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}

launchers = listening()  # mpiexec's own, which its children inherit

from rlhf_spmd.runtime.world.world import World
world = World.discover()
world.use_device("cpu")
before = listening()
world.start_torch({"all": range(3), "two": range(2)}, threads=1)
import torch
torch.distributed.all_reduce(torch.ones(1), group=world.group("all"))
addresses = sorted({address for address, _ in listening() - launchers})

links = {number: os.readlink(f"/proc/self/fd/{number}") for number in map(int, os.listdir("/proc/self/fd")[:-1])}
files = [number for number, link in links.items() if link.startswith("/memfd:rlhf_spmd_")]
read = []
if world.rank == 0 and os.geteuid() == 0:
    for path in (f"/proc/{os.getpid()}/fd/{number}" for number in files):
        read += [path] * (subprocess.run(["cat", path], capture_output=True, user=65534).returncode == 0)
every = world.allgather([addresses, len(listening() - before), len(files), read])
if world.rank == 0:
    print(json.dumps(every))
world.shutdown()
"""


def test_a_job_on_one_machine_can_be_reached_by_loopback_only():
    """Its store is memory of a process, which is gone however the job ends. Variables for jobs of several nodes do
    not open it to a network."""
    exported = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0", "UCX_NET_DEVICES": "eth0"}
    command = [*mpi_command(3), sys.executable, "-c", PROGRAM]
    status, out, err = run_limited(command, limit_s=60.0, environment=mpi_environment(**exported))
    assert status == 0, (out, err)
    of_ranks = json.loads(out)
    assert [addresses for addresses, *_ in of_ranks] == [["127.0.0.1"]] * 3
    assert len({num_ports for _, num_ports, *_ in of_ranks[:2]}) == 1  # rank 0 has no server of its own
    assert all(num_files >= 4 and not read for _, _, num_files, read in of_ranks)  # the records and the store
