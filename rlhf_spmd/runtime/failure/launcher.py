"""The process launcher (mpiexec, srun): number of processes, a check that it matches the MPI library, and clean-up."""

import os
import re
import socket
import stat
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import NamedTuple

from rlhf_spmd.errors import UserError

# Environment variables for the number of processes, the rank and the rank on the node. The first launcher that set its
# variables counts, because srun may itself have started mpiexec.
SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")
LAUNCHERS = (
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),  # the MPICH family's mpiexec, or srun --mpi=pmi2
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI's mpiexec
    SLURM,
)
# number of processes, and of those on this node; the innermost launcher first (srun only tells the nodes)
ON_NODE = (("PMI_SIZE", "MPI_LOCALNRANKS"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"))
NUMBER = re.compile(r"[0-9]{1,9}")
MPICH_FILE = re.compile(r"(/dev/shm/mpich_shm_\S+)\n")  # an unlinked file has "(deleted)" behind it
OF_MPICH = ("PMI_SIZE", "PMI_RANK", "PMI_FD")
# How variables begin by which a launcher tells a process its place in an MPI world.
OF_A_RANK: tuple[str, ...] = ("PMI", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "MPIEXEC_", "SLURM_STEP")
OF_A_RANK += ("SLURM_SRUN_COMM_", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK")

ABORT_S = 2.0  # time for the launcher to end this process
SECOND_REPORT_S = 3.0  # a process that leaves a report to another one waits this long to be ended


class Launched(NamedTuple):
    """What a launcher told a process: how many there are, by which variable, the rank of this one, in the job and on
    its node (None: unknown), and whether the launcher is srun."""

    variable: str = ""
    num: int = 1
    rank: int = 0
    local: int | None = 0
    by_srun: bool = False


def number_in(environment: Mapping[str, str], name: str) -> int | None:
    """Returns the whole number in a variable; None if it is not set, empty, or anything else."""
    text = environment.get(name, "").strip()
    return int(text) if NUMBER.fullmatch(text) else None


def launched(environment: Mapping[str, str]) -> Launched:
    """Returns this process's place in the world of the innermost launcher; without one, of a process alone. Variables
    that name no place in a world, because some are left over from another launcher, count as not set."""
    known = dict(environment)
    in_step = number_in(known, "SLURM_STEP_ID") is not None  # otherwise SLURM_NTASKS belongs to the batch script
    if in_step and number_in(known, SLURM[0]) is None:
        known[SLURM[0]] = known.get("SLURM_NTASKS", "")
    places = []
    for names in LAUNCHERS:
        num, rank, local = (number_in(known, name) for name in names)
        if num is not None and rank is not None and rank < num:
            places.append(Launched(names[0], num, rank, local, names is SLURM))
    if not places:
        return Launched()
    # srun --mpi=pmi2 sets two kinds of variables; its PMI has no rank on the node
    same = [place for place in places if place[1:3] == places[0][1:3] and places[0].local is None]
    return same[-1] if same and same[-1].by_srun else places[0]


def num_launched(environment: Mapping[str, str]) -> int:
    """Returns how many processes the innermost launcher started; 1 without a launcher."""
    return launched(environment).num


def num_on_node(environment: Mapping[str, str]) -> int:
    """Returns how many of the processes are on this node; all of them if the launcher does not tell."""
    for everywhere, here in ON_NODE:
        num = number_in(environment, here)
        if num is not None and number_in(environment, everywhere):
            return num
    return num_launched(environment)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a process that a rank starts and that is not a rank: an MPI library that it loads by
    accident finds no world to join."""
    return {name: text for name, text in environment.items() if not name.startswith(OF_A_RANK)}


def without_library(error: Exception) -> UserError:
    """Returns the message of a process that could not load an MPI library."""
    reason = str(error).split("\n")[0]
    return UserError(
        f"no MPI library can be loaded on {socket.gethostname()} ({reason}): `pip install mpi4py mpich` in this "
        "environment, or load the site's MPI module"
    )


def check_world_size(size: int, environment: Mapping[str, str]) -> None:
    """Detects processes each of which is a world of its own; N equal runs would follow: the launcher is that of another
    MPI, or variables tell of a launcher that did not start this process. Raises UserError, or SystemExit on processes
    that leave the report to the first.
    """
    place = launched(environment)
    if size > 1 or place.num == 1:
        return
    if not reports(environment):
        raise SystemExit(0)
    raise UserError(
        f"{place.num} processes were started ({place.variable}), but each of them sees an MPI world of one rank, "
        "because the launcher does not match the MPI library: use the mpiexec of the MPI that is installed with this "
        "Python, or under Slurm `srun --mpi=pmi2` (MPICH) or `srun --mpi=pmix` (Open MPI). If this process was started "
        f"alone, as in a shell of `srun --pty`, start the ranks there with `mpirun -n {place.num}`, or one rank with "
        f"`{alone(environment)}`"
    )


def alone(environment: Mapping[str, str]) -> str:
    """Returns the beginning of a command, for messages, that does not see the place a launcher gave to this shell."""
    return " ".join(["env", *(f"-u {rank}" for _, rank, _ in LAUNCHERS if rank in environment)])


def reports(environment: Mapping[str, str], *, on_node: bool = False) -> bool:
    """Returns whether this process reports an error that every process has found, before they have met: the first does,
    or the first on this node. Another one waits for SECOND_REPORT_S, in which srun and Open MPI's mpiexec end it, and
    then reports: perhaps it is the only one. MPICH's mpiexec ends no process, but has a connection to those that it
    started.
    """
    place = launched(environment)
    if place.num == 1 or not (place.local if on_node else place.rank):
        return True
    if _connection(environment) is not None:
        return False
    time.sleep(SECOND_REPORT_S)
    return True


def is_launched(environment: Mapping[str, str]) -> bool:
    """Returns whether a launcher may end this process: a launcher of several processes, or MPICH's of one."""
    return num_launched(environment) > 1 or _connection(environment) is not None


def abort(environment: Mapping[str, str], status: int) -> bool:
    """Asks MPICH's mpiexec (PMI 1) to end all ranks with this status, without loading MPI -> whether it was asked; it
    then ends this process within ABORT_S.

    Without this request, mpiexec prints a page about a failed process. Other launchers need only the status.
    """
    if (descriptor := _connection(environment)) is not None:
        with suppress(OSError):
            os.write(descriptor, f"cmd=abort exitcode={status}\n".encode())
            return True
    return False


def _connection(environment: Mapping[str, str]) -> int | None:
    """Returns the descriptor of this process's connection to MPICH's mpiexec; None without one."""
    descriptor = number_in(environment, "PMI_FD")
    if descriptor is None or "MPI_LOCALRANKID" not in environment:  # Slurm's PMI 2 has another protocol
        return None
    with suppress(OSError):
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return descriptor
    return None


def forget_leftovers(environment: MutableMapping[str, str]) -> None:
    """Removes MPICH's variables if their launcher is gone, so that the connection is closed, as in a process
    that a rank has started, or because they are not numbers. MPICH would end the process."""
    numbers = [number_in(environment, name) for name in OF_MPICH if name in environment]
    descriptor = number_in(environment, "PMI_FD")
    with suppress(OSError):
        if None not in numbers and (descriptor is None or os.fstat(descriptor)):
            return
    for name in [name for name in environment if name.startswith(("PMI_", "MPI_LOCAL", "HYDRA_", "HYDI_"))]:
        del environment[name]


def unlink_shared_memory(process: int | str = "self") -> None:
    """Unlinks the shared-memory file of MPICH's ranks on this node, which this process has mapped; all of them must
    have mapped it, or be ended.

    MPICH unlinks it only at its end, so a killed job would leave megabytes of memory behind, and a later Slurm step
    with the same ids and more ranks would fail.
    """
    with suppress(OSError), open(f"/proc/{process}/maps", encoding="utf-8", errors="replace") as maps:
        for path in MPICH_FILE.findall(maps.read()):
            os.unlink(path)
