"""What a rank decides about its launcher before it can communicate."""

import os
import socket

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.failure import launcher

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
