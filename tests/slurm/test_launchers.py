"""`train` under srun and mpirun in a job, on two nodes and on one: the same numbers, and listening sockets.

make test-slurm
"""

import pytest

from tests.slurm.cluster import NETWORK
from tests.slurm.site import OPTIONS, TWO_NODES, numbers


def of_program(listeners):
    return [line for line in listeners if '"python' in line]


def test_what_mpi_publishes_has_room(site, undisturbed):
    """Slurm's PMI cuts lines at 1,024 characters, and then nobody starts."""
    lines = [line for node in site.cluster.names for line in site.cluster.pmi_lines(node)]
    assert lines and max(map(len, lines)) < 512, max(lines, key=len)


def test_only_the_chosen_interface_listens(undisturbed):
    _, listeners = undisturbed
    for index, node in enumerate(listeners, start=11):
        found = of_program(listeners[node])
        assert found and all(line.startswith(f"{NETWORK}.{index} ") for line in found), found


def test_mpirun_on_two_nodes_draws_the_same(site, undisturbed):
    job = site.submit("train.sbatch", *OPTIONS, options=TWO_NODES, RLHF_SPMD_LAUNCHER="mpirun")
    site.ends_well(job)
    assert numbers(site.metrics(f"job-{job}")) == undisturbed[0]


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_one_node_listens_on_loopback_only(site, launcher):
    options = ("--strategy", "flattening", "iterations=2", "rollout_batch=32")
    job = site.submit("train.sbatch", *options, options=("--nodes=1", "--ntasks=2"), RLHF_SPMD_LAUNCHER=launcher)
    site.after(job, 1)
    found = [line for node in site.cluster.names for line in of_program(site.cluster.listeners(node))]
    assert found and all(line.startswith("127.0.0.1 ") for line in found), found
    site.ends_well(job)
