"""What a rank decides about launcher, devices and network before it can communicate."""

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.guard import launcher
from rlhf_spmd.runtime.observe.position_board import Board, RankStatus, new_file
from rlhf_spmd.runtime.world import groups

SRUN = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
        {**SRUN, "PMI_SIZE": "1", "PMI_RANK": "0"},  # mpiexec -n 1 inside a step
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    ],
)
def test_one_rank_is_fine(environment):
    launcher.check_world_size(1, environment)


@pytest.mark.parametrize(
    "environment",
    [
        SRUN,
        {"PMI_SIZE": "8", "PMI_RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_SIZE": "8", "PMI_RANK": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
)
def test_everybody_alone_is_refused_by_the_first(environment):
    with pytest.raises(UserError, match="8 processes were started.*srun --mpi=pmi2"):
        launcher.check_world_size(1, environment)
    launcher.check_world_size(8, environment)
    later = {name: "3" if name.endswith(("RANK", "PROCID")) else value for name, value in environment.items()}
    with pytest.raises(SystemExit) as caught:
        launcher.check_world_size(1, later)
    assert caught.value.code == 0


def test_the_interface_is_the_users_choice_or_real(monkeypatch):
    monkeypatch.setattr(
        groups, "interface_addresses", lambda: {"lo": "127.0.0.1", "eth0": "192.0.2.7", "ib0": "198.51.100.7"}
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
    monkeypatch.setattr(groups, "interface_addresses", lambda: {"lo": "127.0.0.1"})
    with pytest.raises(UserError, match="no network interface"):
        groups.choose_interface([])


def test_this_machines_interfaces():
    assert groups.interface_addresses().get("lo") == "127.0.0.1"
    assert groups.network_stack() == groups.network_stack()


def test_a_board_shows_positions_and_grants_one_claim():
    path = new_file(2)
    first, second = (Board(path, rank=rank, node_ranks=(4, 6), node=0, num_nodes=1) for rank in (4, 6))
    assert first.read((4, 6)) == {4: RankStatus(), 6: RankStatus()}
    second.post(b"iteration 1", 1, 0)
    second.post(("iteration 2 \u2603" + "x" * 2000).encode(), 2, 0)
    text = first.read((6,))[6].text
    assert text.startswith("iteration 2 \u2603xxx") and 900 < len(text) < 1020
    assert first.statuses((6,)) == {}  # it has shown no life yet
    second.post(b"iteration 3", 3, 7)
    second.report(active_s=1.0, is_meeting=True)
    assert first.read((6,))[6].text == "iteration 3"
    status = first.statuses((4, 6))[6]
    assert (status.text, status.iteration, status.position, status.active_s, status.is_meeting) == (
        "iteration 3",
        3,
        7,
        1.0,
        True,
    )
    assert first.read((5,)) == {}  # on another node, and there is no store to ask
    assert [first.claim(), second.claim(), first.claim()] == [True, False, False]
