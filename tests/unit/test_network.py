"""The network interface that MPI is restricted to, according to the launcher."""

import pytest

from rlhf_spmd.runtime.world import network

HYDRA = {"PMI_SIZE": "8", "PMI_RANK": "0", "MPI_LOCALNRANKS": "8"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
SRUN = {"PMI_SIZE": "8", "PMI_RANK": "0", "SLURM_STEP_NUM_NODES": "1"}


LEFT = {"PMI_SIZE": "", "MPI_LOCALNRANKS": "x", "SLURM_STEP_NUM_NODES": " "}


@pytest.mark.parametrize("environment", [{}, HYDRA, OPEN_MPI, SRUN, {**HYDRA, "SLURM_STEP_NUM_NODES": "2"}, LEFT])
def test_one_node_keeps_to_loopback(environment):
    assert network.on_one_node(environment)
    environment = {**environment, network.INTERFACE_OPTION: "ib0", "FI_TCP_IFACE": "eth3"}
    network.choose_for_mpi(environment)
    assert environment["UCX_NET_DEVICES"] == "lo" and environment["FI_TCP_IFACE"] == "eth3"


@pytest.mark.parametrize(
    "environment",
    [
        {**HYDRA, "MPI_LOCALNRANKS": "4"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
        {**SRUN, "SLURM_STEP_NUM_NODES": "2"},
        {"PMI_SIZE": "8", "PMI_RANK": "0"},  # a launcher that does not say
    ],
)
def test_several_nodes_keep_to_what_the_user_names(environment):
    assert not network.on_one_node(environment)
    unnamed = dict(environment)
    network.choose_for_mpi(unnamed)
    assert unnamed == environment
    named = {**environment, network.INTERFACE_OPTION: "ib0"}
    network.choose_for_mpi(named)
    assert {named[name] for name in network.MPI_VARIABLES} == {"ib0"}


@pytest.mark.parametrize(
    ("environment", "chosen"),
    [
        ({**SRUN, "PMI_FD": "11", "SLURM_STEP_NUM_NODES": "2"}, "ofi"),
        ({**SRUN, "PMI_FD": "11", "SLURM_STEP_NUM_NODES": "2", network.NETMOD: "ucx"}, "ucx"),
        ({**SRUN, "PMI_FD": "11"}, None),
        ({**HYDRA, "PMI_FD": "11", "MPI_LOCALNRANKS": "4", "SLURM_STEP_NUM_NODES": "2"}, None),
    ],
    ids=["srun", "chosen by the user", "srun on one node", "mpirun in a job"],
)
def test_an_address_has_room_in_slurms_messages(environment, chosen):
    network.choose_for_mpi(environment)
    assert environment.get(network.NETMOD) == chosen
