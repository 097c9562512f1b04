"""The network interface of torch.distributed."""

import pytest
from torch import distributed

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.world import groups
from rlhf_spmd.runtime.world.devices import RankDevice


def test_the_interface_is_the_users_choice_or_real(monkeypatch):
    monkeypatch.setattr(
        groups, "interface_addresses", lambda *_: {"lo": "127.0.0.1", "eth0": "192.0.2.7", "ib0": "198.51.100.7"}
    )
    monkeypatch.delenv(groups.INTERFACE_OPTION, raising=False)
    assert groups.choose_interface([]) == ("eth0", "192.0.2.7")
    assert groups.choose_interface(["127.0.0.1"]) == ("eth0", "192.0.2.7")  # a route by loopback leads nowhere
    monkeypatch.setenv(groups.INTERFACE_OPTION, "ib0")
    assert groups.choose_interface([]) == ("ib0", "198.51.100.7")
    monkeypatch.setenv(groups.INTERFACE_OPTION, "ib1")
    with pytest.raises(UserError, match="RLHF_SPMD_INTERFACE=ib1.*eth0, ib0, lo"):
        groups.choose_interface([])
    monkeypatch.delenv(groups.INTERFACE_OPTION)
    monkeypatch.setattr(groups, "interface_addresses", lambda *_: {"lo": "127.0.0.1"})
    with pytest.raises(UserError, match="no network interface"):
        groups.choose_interface([])


def test_a_group_of_gloo_beside_nccl_has_all_ranks(monkeypatch):
    """The others would wait for ever: torch lets them split NCCL's communicator, in which its members take no part."""
    made = []
    monkeypatch.setattr(distributed, "init_process_group", lambda **options: None)
    monkeypatch.setattr(distributed, "new_group", lambda ranks, timeout, backend: made.append((ranks, backend)))
    options = {"store": None, "rank": 0, "size": 3, "device": RankDevice("cuda", 0, 1, 3), "timeout_s": 1.0}
    monkeypatch.setenv(groups.HEARTBEAT, "480")
    groups.make_groups({"ranks 0-1": (0, 1), "host 0-2": (0, 1, 2)}, **options)
    assert made == [([0, 1], None), ([0, 1, 2], "gloo")]
    with pytest.raises(AssertionError, match="lacks ranks"):
        groups.make_groups({"host 0-1": (0, 1)}, **options)


# The network interface that MPI and torch are restricted to, according to the launcher

HYDRA = {"PMI_SIZE": "8", "PMI_RANK": "0", "MPI_LOCALNRANKS": "8"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
SRUN = {"PMI_SIZE": "8", "PMI_RANK": "0", "SLURM_STEP_NUM_NODES": "1"}


LEFT = {"PMI_SIZE": "", "MPI_LOCALNRANKS": "x", "SLURM_STEP_NUM_NODES": " "}


@pytest.mark.parametrize("environment", [{}, HYDRA, OPEN_MPI, SRUN, {**HYDRA, "SLURM_STEP_NUM_NODES": "2"}, LEFT])
def test_one_node_keeps_to_loopback(environment):
    assert groups.on_one_node(environment)
    environment = {**environment, groups.INTERFACE_OPTION: "ib0", "FI_TCP_IFACE": "eth3", "GLOO_SOCKET_IFNAME": "eth0"}
    groups.choose_for_mpi(environment)
    groups.choose_for_torch(environment, "lo")
    assert {environment[name] for name in (*groups.MPI_VARIABLES, groups.GLOO)} == {"lo"}
    assert environment[groups.NCCL] == "=lo"


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
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"ib0": [], "lo": []})
    assert not groups.on_one_node(environment)
    unnamed = dict(environment)
    groups.choose_for_mpi(unnamed)
    assert unnamed == environment
    named = {**environment, groups.INTERFACE_OPTION: "ib0"}
    groups.choose_for_mpi(named)
    assert {named[name] for name in groups.MPI_VARIABLES} == {"ib0"}
    torch = {groups.GLOO: "ib0", groups.NCCL: " "}
    groups.choose_for_torch(torch, "eth0")
    assert torch == {groups.GLOO: "ib0", groups.NCCL: "=eth0"}
    named[groups.INTERFACE_OPTION] = "nope0"
    with pytest.raises(UserError, match=r"RLHF_SPMD_INTERFACE=nope0, but .*; it has ib0, lo$"):
        groups.choose_for_mpi(named)


@pytest.mark.parametrize(
    ("environment", "chosen"),
    [
        ({**SRUN, "PMI_FD": "11", "SLURM_STEP_NUM_NODES": "2"}, "ofi"),
        ({**SRUN, "PMI_FD": "11", "SLURM_STEP_NUM_NODES": "2", groups.NETMOD: "ucx"}, "ucx"),
        ({**SRUN, "PMI_FD": "11"}, None),
        ({**HYDRA, "PMI_FD": "11", "MPI_LOCALNRANKS": "4", "SLURM_STEP_NUM_NODES": "2"}, None),
    ],
    ids=["srun", "chosen by the user", "srun on one node", "mpirun in a job"],
)
def test_an_address_has_room_in_slurms_messages(environment, chosen):
    groups.choose_for_mpi(environment)
    assert environment.get(groups.NETMOD) == chosen
