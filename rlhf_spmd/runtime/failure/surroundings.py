"""What a rank needs from its machine: the working folder, open files, and an address that answers. No torch, no MPI."""

import os
import resource
import socket
from collections.abc import Iterable
from contextlib import suppress

import psutil

from rlhf_spmd.errors import UserError

OPEN_FILES = 32  # of a rank beyond those it has when torch is started, without connections: 26 measured on 1-8 ranks
ANSWER_S = 10.0


def why_no_folder() -> str:
    """Returns the reason why relative paths mean nothing in this process; empty if they do."""
    try:
        os.getcwd()
    except OSError as error:
        return f"the working folder is gone ({error.strerror}): it was deleted or replaced; `cd` into one that exists"
    return ""


def check_folder() -> tuple[str, int]:
    """Returns path and inode of the working folder. Raises UserError if it is gone."""
    if text := why_no_folder():
        raise UserError(text)
    return os.getcwd(), os.stat(".").st_ino


def check_common_folder(folders: Iterable[tuple[str, int]]) -> None:
    """Raises UserError if a rank works in a folder that this host lacks: srun falls back to /tmp on a node that does
    not see the folder. folders: of all ranks. The inode tells whether it is the same folder by another path."""
    here, inode = check_folder()
    for path, other in sorted({(path, other) for path, other in folders}):
        if path != here and other != inode and not os.path.isdir(path):
            raise UserError(
                f"{socket.gethostname()} does not see the working folder {path} of other ranks, and works in {here}: "
                "start the job in a folder that all nodes see"
            )


def raise_open_files(num_connections: int) -> None:
    """Raises the limit of open files as far as this process may. Raises UserError if it is too low for so many
    connections of this rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    needed = psutil.Process().num_fds() + OPEN_FILES + num_connections
    if soft != resource.RLIM_INFINITY and soft < needed:
        rounded = -(-needed // 100) * 100  # the same for all ranks, which differ by what their launcher has opened
        raise UserError(
            f"the limit of open files on {socket.gethostname()} is {soft} (`ulimit -n`), but this rank may need up to "
            f"{rounded}: raise the limit where the job is started"
        )


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
