"""The process launcher (mpiexec, srun): number of processes, a check that it matches the MPI library, and clean-up."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from rlhf_spmd.errors import UserError

# Environment variables for the number of processes, the rank and the rank on the node. The first launcher that set its
# variables counts, because srun may itself have started mpiexec.
LAUNCHERS = (
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),  # the MPICH family's mpiexec, or srun --mpi=pmi2
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI's mpiexec
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),  # srun
)
# How variables begin by which a launcher tells a process its place in an MPI world.
OF_A_RANK = ("PMI", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "MPIEXEC_", "SLURM_STEP", "SLURM_SRUN_COMM_")
OF_A_RANK += ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK")

ABORT_S = 2.0  # time for the launcher to end this process


def num_launched(environment: Mapping[str, str]) -> int:
    """How many processes the innermost launcher started; 1 without a launcher."""
    return _launched(environment).num


def rank_launched(environment: Mapping[str, str]) -> int:
    """The rank that the innermost launcher gave this process; 0 without a launcher."""
    return _launched(environment).rank


class Launched(NamedTuple):
    """What a launcher told a process: how many there are, by which variable, and the rank of this one."""

    variable: str = ""
    num: int = 1
    rank: int = 0


def _launched(environment: Mapping[str, str]) -> Launched:
    """By the innermost launcher."""
    known = dict(environment)
    if "SLURM_STEP_ID" in known and "SLURM_NTASKS" in known:  # outside a step SLURM_NTASKS belongs to the batch script
        known.setdefault("SLURM_STEP_NUM_TASKS", known["SLURM_NTASKS"])
    present = (names for names in LAUNCHERS if names[0] in known and names[1] in known)
    return next((Launched(count, int(known[count]), int(known[rank])) for count, rank, _ in present), Launched())


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that a rank starts and that is no rank: an MPI library that it loads by accident
    finds no world to join."""
    return {name: text for name, text in environment.items() if not name.startswith(OF_A_RANK)}


def check_world_size(size: int, environment: Mapping[str, str]) -> None:
    """Detects a launcher of another MPI, which starts every process as a world of its own; N equal runs would follow.

    The first process then raises UserError, the others exit silently.
    """
    count, num, rank = _launched(environment)
    if size > 1 or num == 1:
        return
    if rank > 0:
        raise SystemExit(0)
    raise UserError(
        f"{num} processes were started ({count}), but each of them sees an MPI world of one rank, because the launcher "
        "does not match the MPI library: use the mpiexec of the MPI that is installed with this Python, or under Slurm "
        "`srun --mpi=pmi2` (MPICH) or `srun --mpi=pmix` (Open MPI)"
    )


def first_on_node(environment: Mapping[str, str]) -> bool:
    """Whether this process is the first on its node, according to the environment."""
    return all(environment.get(local, "0") == "0" for _, _, local in LAUNCHERS)


def abort(environment: Mapping[str, str], status: int) -> None:
    """Asks MPICH's mpiexec (PMI 1) to end all ranks with this status, without loading MPI.

    Without this request, mpiexec prints a page about a failed process. Other launchers need only the status.
    """
    descriptor = environment.get("PMI_FD", "")
    if descriptor.isdigit() and "MPI_LOCALRANKID" in environment:  # Slurm's PMI 2 has another protocol
        with suppress(OSError):
            os.write(int(descriptor), f"cmd=abort exitcode={status}\n".encode())
            time.sleep(ABORT_S)


def unlink_shared_memory() -> None:
    """Unlinks the shared-memory file of MPICH's ranks on this node; all of them must have mapped it.

    MPICH unlinks it only at its end, so a killed job would leave megabytes of memory behind, and a later Slurm step
    with the same ids and more ranks would fail.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps, suppress(OSError):
        for line in maps:
            fields = line.split()  # an unlinked file has one more field: "(deleted)"
            if len(fields) == 6 and fields[5].startswith("/dev/shm/mpich_shm_"):
                os.unlink(fields[5])
                return
