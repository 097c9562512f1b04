"""What a rank needs from its machine, compared with what it has: the working folder, open files, shared memory, and an
address that answers. A lack of it appears later as the failure of something else. No torch, no MPI.
"""

import os
import resource
import socket
from collections.abc import Iterable
from contextlib import suppress

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.observe.node_files import SHARED_MEMORY

OPEN_FILES = 32  # of a rank beyond those it has when torch is started, without connections: 26 measured on 1-8 ranks
MPI_BYTES = 8 << 20  # of shared memory that MPI may need for a rank: 5.4 MB measured, MPICH 5.0 with 1-16 ranks
MPI_LEAST = 24 << 20  # for any number of ranks: 2 used 10 MiB of 24, and ended by SIGSEGV with 17 and with 20
THREADS = 16  # that a rank may need to start: 2 ranks ended by SIGABRT with 20 processes and threads, and ran with 24
ANSWER_S = 10.0


def without_folder() -> str:
    """Returns the reason why relative paths mean nothing in this process; empty if they do."""
    try:
        os.getcwd()
    except OSError as error:
        return f"the working folder is gone ({error.strerror}): it was deleted or replaced; `cd` into one that exists"
    return ""


def check_folder() -> None:
    """Raises UserError if the working folder is gone."""
    if text := without_folder():
        raise UserError(text)


def working_folder() -> tuple[str, int]:
    """Returns path and inode of the working folder, for check_common_folder."""
    return os.getcwd(), os.stat(".").st_ino


def check_common_folder(folders: Iterable[tuple[str, int]]) -> None:
    """Raises UserError if a rank works in a folder that this host lacks: srun falls back to /tmp on a node that does
    not see the folder. folders: of all ranks. The inode tells whether it is the same folder by another path."""
    here, inode = working_folder()
    for path, other in sorted({(path, other) for path, other in folders}):
        if path != here and other != inode and not os.path.isdir(path):
            raise UserError(
                f"{socket.gethostname()} does not see the working folder {path} of other ranks, and works in {here}: "
                "start the job in a folder that all nodes see"
            )


def check_open_files(num_connections: int) -> None:
    """Raises the limit of open files if it is too low for so many connections of this rank, or UserError if it must
    not be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _num_open() + OPEN_FILES + num_connections
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return
    rounded = -(-needed // 100) * 100  # the same for all ranks, which differ by what their launcher has opened
    raise UserError(
        f"the limit of open files on {socket.gethostname()} is {soft} (`ulimit -n`), but this rank may need up to "
        f"{rounded}: raise the limit where the job is started"
    )


def lack_of_threads() -> str:
    """Returns the reason why compiled code may have failed to start a thread. Empty if this user may start enough of
    them."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    user = os.getuid()
    if limit == resource.RLIM_INFINITY or user == 0:  # root has no limit
        return ""
    num = sum(_num_threads(process, user) for process in os.listdir("/proc") if process.isdigit())
    if num + THREADS <= limit:
        return ""
    return (
        f"most likely it could not start a thread: this user may have {limit} processes and threads (`ulimit -u`), and "
        f"{num} others run: raise the limit, or start fewer ranks"
    )


def _num_threads(process: str, user: int) -> int:
    """Returns the threads of a process of this user; 0 if it is another's, or has ended."""
    try:
        with open(f"/proc/{process}/status", encoding="utf-8", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file)
    except OSError:
        return 0
    return int(fields["Threads"]) if int(fields["Uid"].split()[0]) == user else 0


def _num_open() -> int:
    """Returns how many descriptors are in use; all of them if none is left to count with."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def check_answer(address: str) -> None:
    """Raises UserError if this process cannot reach itself at one of its own addresses."""
    try:
        with socket.create_server((address, 0)) as listener:
            reach(*listener.getsockname())
    except OSError as error:
        loopback = ": bring the loopback interface up (`ip link set lo up`)" if address.startswith("127.") else ""
        raise UserError(
            f"{socket.gethostname()} can't reach its own address {address} ({error.strerror or error}){loopback}"
        ) from error


def reach(address: str, port: int) -> None:
    """Connects once. Raises OSError with the reason, after ANSWER_S at most."""
    socket.create_connection((address, port), ANSWER_S).close()


def shared_memory_bytes() -> tuple[int, int]:
    """Returns the size of shared memory on this machine, and how much of it is free."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0, 0
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def lack_of_shared_memory(num_ranks: int, num_bytes: int, num_free: int) -> str:
    """Returns the reason why MPI may have failed at its start with so many ranks on this node: size and free bytes of
    its shared memory then. Empty if they suffice."""
    needed = max(MPI_LEAST, MPI_BYTES * num_ranks)
    if not num_ranks or num_free >= needed:
        return ""
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    return (
        f"most likely {SHARED_MEMORY} is too small: it has {num_bytes / 2**20:.3g} MiB, {num_free / 2**20:.3g} MiB of "
        f"them free, and MPI may need {needed / 2**20:.3g} MiB for the {ranks} on this node; enlarge it (`docker run "
        f"--shm-size={max(1, needed >> 29)}g`, `mount -o remount,size={max(1, needed >> 29)}g {SHARED_MEMORY}`), or "
        "start fewer ranks here"
    )
