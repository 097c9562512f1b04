"""The network interface that MPI is restricted to, according to the launcher."""

import re

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.world import network

HYDRA = {"PMI_SIZE": "8", "PMI_RANK": "0", "MPI_LOCALNRANKS": "8"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
SRUN = {"PMI_SIZE": "8", "PMI_RANK": "0", "SLURM_STEP_NUM_NODES": "1"}


LEFT = {"PMI_SIZE": "", "MPI_LOCALNRANKS": "x", "SLURM_STEP_NUM_NODES": " "}


@pytest.mark.parametrize("environment", [{}, HYDRA, OPEN_MPI, SRUN, {**HYDRA, "SLURM_STEP_NUM_NODES": "2"}, LEFT])
def test_one_node_keeps_to_loopback(environment):
    assert network.on_one_node(environment)
    environment = {**environment, network.INTERFACE_OPTION: "ib0", "FI_TCP_IFACE": "eth3", "GLOO_SOCKET_IFNAME": "eth0"}
    network.choose_for_mpi(environment)
    network.choose_for_torch(environment, "lo")
    assert {environment[name] for name in (*network.MPI_VARIABLES, network.GLOO)} == {"lo"}
    assert environment[network.NCCL] == "=lo"


@pytest.mark.parametrize(
    "environment",
    [
        {**HYDRA, "MPI_LOCALNRANKS": "4"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
        {**SRUN, "SLURM_STEP_NUM_NODES": "2"},
        {"PMI_SIZE": "8", "PMI_RANK": "0"},  # a launcher that does not say
    ],
)
def test_several_nodes_keep_to_what_the_user_names(environment, monkeypatch):
    monkeypatch.setattr(network, "_with_address", lambda: ["ib0", "lo"])
    assert not network.on_one_node(environment)
    unnamed = dict(environment)
    network.choose_for_mpi(unnamed)
    assert unnamed == environment
    named = {**environment, network.INTERFACE_OPTION: "ib0"}
    network.choose_for_mpi(named)
    assert {named[name] for name in network.MPI_VARIABLES} == {"ib0"}
    torch = {network.GLOO: "ib0", network.NCCL: " "}
    network.choose_for_torch(torch, "eth0")
    assert torch == {network.GLOO: "ib0", network.NCCL: "=eth0"}
    named[network.INTERFACE_OPTION] = "nope0"
    with pytest.raises(UserError, match=r"RLHF_SPMD_INTERFACE=nope0, but .* \(nope0\); it has ib0, lo$"):
        network.choose_for_mpi(named)


@pytest.mark.parametrize(
    ("name", "good", "wrong"),
    [
        (network.GLOO, ("", " ", "eth0", "eth0,lo"), ("eth", "=eth0", "eth0,nope0", "eth0 lo")),
        (network.NCCL, ("", "eth", "=eth0", "^lo", "^=lo", "nope0,eth0:5000", "^eth"), ("nope0", "=eth", "^eth,lo")),
    ],
)
def test_an_interface_that_is_absent_is_named(name, good, wrong, monkeypatch):
    assert "lo" in network._with_address()
    monkeypatch.setattr(network, "_with_address", lambda: ["eth0", "lo"])
    for text in good:
        network.check_interfaces({name: text}, (name,))
    for text in wrong:
        with pytest.raises(UserError, match=f"{name}={re.escape(text)}, but .* it has eth0, lo$"):
            network.check_interfaces({name: text}, (name,))


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
