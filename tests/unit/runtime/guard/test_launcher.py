"""What a rank decides about launcher, devices and network before it can communicate."""

import os
import socket

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.guard import launcher
from rlhf_spmd.runtime.guard.launcher import Launched
from rlhf_spmd.runtime.observe import node_files
from rlhf_spmd.runtime.observe.node_files import new_file, open_file
from rlhf_spmd.runtime.observe.position_board import Board, RankStatus, board_bytes
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


LEFT = {"OMPI_COMM_WORLD_LOCAL_RANK": "2", "SLURM_LOCALID": "3", "MPI_LOCALRANKID": "1"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"PMI_SIZE": "", "PMI_RANK": ""}, Launched()),
        ({"PMI_SIZE": " 4 ", "PMI_RANK": "1"}, Launched("PMI_SIZE", 4, 1, None)),
        ({"PMI_SIZE": "x", "PMI_RANK": "0", **LEFT}, Launched()),
        ({"PMI_SIZE": "9" * 5000, "PMI_RANK": "0"}, Launched()),
        ({"PMI_SIZE": "\uff12", "PMI_RANK": "0"}, Launched()),  # a digit, but not of ASCII
        ({"PMI_SIZE": "2", "PMI_RANK": "2"}, Launched()),
        ({"PMI_SIZE": "", "PMI_RANK": "0", **SRUN}, Launched("SLURM_STEP_NUM_TASKS", 8, 0, None, True)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "", "SLURM_LOCALID": "0"}, Launched("SLURM_STEP_NUM_TASKS", 8, 0, 0, True)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "", "SLURM_STEP_ID": ""}, Launched()),
        ({**SRUN, "PMI_SIZE": "8", "PMI_RANK": "0"}, Launched("SLURM_STEP_NUM_TASKS", 8, 0, None, True)),  # by PMI 2
        ({**SRUN, "PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1"}, Launched("PMI_SIZE", 2, 1, 1)),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": ""}, Launched()),
        (LEFT, Launched()),
    ],
)
def test_what_is_left_of_a_launcher_is_no_place(environment, place):
    assert launcher.launched(environment) == place


def test_one_of_many_reports_what_all_find(monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(launcher.time, "sleep", waited.append)
    for environment in ({}, LEFT, SRUN, {"PMI_SIZE": "1", "PMI_RANK": "0", **LEFT}):
        assert launcher.reports(environment) and not waited
    second = {"PMI_SIZE": "8", "PMI_RANK": "3", "MPI_LOCALRANKID": "0"}
    assert launcher.reports(second, on_node=True) and not waited
    assert launcher.reports(second) and waited  # it was not ended meanwhile, so it may be the only one
    with pytest.raises(UserError, match="8 processes were started.*`mpirun -n 8`, or one rank with `env -u PMI_RANK`"):
        launcher.check_world_size(1, second)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not launcher.reports({**second, "PMI_FD": str(ours.fileno())})
        with pytest.raises(SystemExit) as caught:
            launcher.check_world_size(1, {**second, "PMI_FD": str(ours.fileno())})
        assert caught.value.code == 0


def test_variables_that_would_end_mpi_are_forgotten():
    of_step = {"SLURM_STEP_ID": "0", "PATH": "/bin"}
    with open(os.devnull, "rb") as file:
        for kept in ({"PMI_SIZE": "8", "PMI_RANK": "0"}, {"PMI_SIZE": "8", "PMI_FD": str(file.fileno())}):
            environment = {**kept, **of_step}
            launcher.forget_leftovers(environment)
            assert environment == {**kept, **of_step}
    for left in ({"PMI_SIZE": ""}, {"PMI_SIZE": "x", "PMI_RANK": "0"}, {"PMI_SIZE": "2", "PMI_FD": "100000"}):
        environment = {**left, "MPI_LOCALNRANKS": "2", **of_step}
        launcher.forget_leftovers(environment)
        assert environment == of_step


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
    file = new_file(board_bytes(2))
    first, second = (Board(open_file(*file), rank=rank, node_ranks=(4, 6), node=0, num_nodes=1) for rank in (4, 6))
    os.unlink(file[0])
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


@pytest.mark.parametrize("has_room", [True, False])
def test_a_file_of_the_ranks_of_a_node_has_no_name(has_room, monkeypatch, tmp_path):
    folder = tmp_path if has_room else tmp_path / "absent"
    monkeypatch.setattr(node_files, "SHARED_MEMORY", str(folder))
    everyone: list[list] = []

    def gather(view: list) -> list[list]:
        everyone.append(view)
        return [view, ["/nope", 0]]

    descriptor, views = node_files.share_file(4096, 0, 0, gather, is_empty=True)
    assert os.fstat(descriptor).st_size == 0 and views == [[0, True], ["/nope", 0]] and not list(tmp_path.iterdir())
    assert os.path.realpath(f"/proc/self/fd/{descriptor}").startswith(str(folder) if has_room else "/memfd:")
    assert node_files.open_file(f"/proc/self/fd/{descriptor}", 0) is None  # another file by that path
    assert node_files.share_file(4096, 1, 1, gather) == (None, [[1, False], ["/nope", 0]])
    os.close(descriptor)
