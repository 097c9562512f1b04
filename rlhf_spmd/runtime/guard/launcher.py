"""What the launcher gives this process: its environment tells whether it fits the MPI library, and files to tidy up."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress

from rlhf_spmd.errors import UserError

# variables that tell a process how many it was started with, its rank among them and its rank on its node; the first
# launcher that left its mark is the nearest, since mpiexec may itself have been started by srun.
LAUNCHERS = (
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),  # the MPICH family's mpiexec, or srun --mpi=pmi2
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI's mpiexec
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),  # srun
)

ABORT_S = 2.0  # the launcher gets so long to end this process


def num_launched(environment: Mapping[str, str]) -> int:
    """How many processes the nearest launcher says it started; 1 without a launcher."""
    launcher = _launcher(environment)
    return int(_with_tasks(environment)[launcher[0]]) if launcher else 1


def rank_launched(environment: Mapping[str, str]) -> int | None:
    """The rank that the nearest launcher gave this process; None without a launcher."""
    launcher = _launcher(environment)
    return int(environment[launcher[1]]) if launcher else None


def _launcher(environment: Mapping[str, str]) -> tuple[str, str] | None:
    known = _with_tasks(environment)
    return next(((count, rank) for count, rank, _ in LAUNCHERS if count in known and rank in known), None)


def _with_tasks(environment: Mapping[str, str]) -> Mapping[str, str]:
    if "SLURM_STEP_ID" in environment and "SLURM_NTASKS" in environment:  # without a step it is the batch script's
        return {"SLURM_STEP_NUM_TASKS": environment["SLURM_NTASKS"], **environment}
    return environment


def refuse_alone(size: int, environment: Mapping[str, str]) -> None:
    """A launcher of another MPI starts every process as a world of its own: better no run than N times the same.

    The first process raises UserError, the others leave quietly.
    """
    num = num_launched(environment)
    if size > 1 or num == 1:
        return
    count, rank = _launcher(environment)
    if int(environment[rank]) > 0:
        raise SystemExit(0)
    raise UserError(
        f"{num} processes were started ({count}), but MPI shows each of them a world of its own, "
        "because the launcher and the MPI library don't belong together: use the mpiexec of the MPI that is installed "
        "with this Python, or under Slurm `srun --mpi=pmi2` (MPICH) or `srun --mpi=pmix` (Open MPI)"
    )


def first_on_node(environment: Mapping[str, str]) -> bool:
    """Whether this process should speak for its node, as far as the environment tells."""
    return all(environment.get(local, "0") == "0" for _, _, local in LAUNCHERS)


def abort(environment: Mapping[str, str], status: int) -> None:
    """Asks MPICH's mpiexec to end all ranks with this status, in its own words (PMI 1), without loading MPI.

    A process that just ends badly makes it print a page about that. Other launchers are content with the status.
    """
    descriptor = environment.get("PMI_FD", "")
    if descriptor.isdigit() and "MPI_LOCALRANKID" in environment:  # Slurm's PMI 2 has other words
        with suppress(OSError):
            os.write(int(descriptor), f"cmd=abort exitcode={status}\n".encode())
            time.sleep(ABORT_S)


def unname_shared_memory() -> None:
    """Removes the name of the file that MPICH's ranks of this node share; all of them must have mapped it.

    MPICH keeps the name until its end, so every job that is killed would leave megabytes of memory behind, and a later
    Slurm step with the same ids and more ranks would trip over it.
    """
    with open("/proc/self/maps") as maps, suppress(OSError):
        for line in maps:
            fields = line.split()  # a removed file has one more: "(deleted)"
            if len(fields) == 6 and fields[5].startswith("/dev/shm/mpich_shm_"):
                os.unlink(fields[5])
                return
