"""Files outside the run folder that only the ranks of one node share, in shared memory or where temporary files go.

No other user can open them. Each has a name only until all ranks have opened it; if the rank that made it is killed
before, its supervisor removes it (`remove`). So nothing is left behind, however a job ends.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = "/dev/shm"
PREFIX = f"rlhf_spmd_{os.urandom(16).hex()}_"  # of one rank and its supervisor, which is forked after this import

COMPILED = "compiled"  # the folder of what torch compiles


def remove(which: str = "*") -> None:
    """Removes the files and folders that this rank has left. which: those whose names end so (a pattern)."""
    with suppress(OSError):
        for folder in (SHARED_MEMORY, tempfile.gettempdir()):
            for path in Path(folder).glob(f"{PREFIX}{which}"):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


def keep_compiled() -> None:
    """Lets torch keep what it compiles in a folder of this rank, unless the user has named one. torch makes the folder
    when it is imported for the compiler, as transformers does."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"{PREFIX}{COMPILED}")))


def share_file(
    num_bytes: int, rank: int, creator: int, gather: Callable[[list], list[list]], *, is_empty: bool = False
) -> tuple[int | None, list[list]]:
    """Makes a file on one rank of a node and opens it on all of them. Returns this rank's descriptor, None if it does
    not see the file, as in a container of its own; and of every rank its creator and whether it sees the file.
    Collective.

    creator: the rank that makes it.
    gather: returns every rank's value.
    is_empty: there is room for the bytes, but the file has none yet.

    The file is never on a disk, which may be a network's.
    """
    path, inode = new_file(num_bytes, is_empty=is_empty) if rank == creator else ("", 0)
    try:
        files = gather([path, inode])
        descriptor = open_file(*files[creator])
        return descriptor, gather([creator, descriptor is not None])
    finally:
        with suppress(OSError):  # memory of a process has no name
            os.unlink(path)


def new_file(num_bytes: int, *, is_empty: bool = False) -> tuple[str, int]:
    """Creates a file of zeros, in shared memory, or as memory of this process if it has no room -> path and inode."""
    with suppress(OSError):
        descriptor, path = tempfile.mkstemp(prefix=PREFIX, dir=SHARED_MEMORY)
        try:
            return path, _reserved(descriptor, num_bytes, is_empty)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
    descriptor = os.memfd_create("rlhf_spmd")  # stays open: the path leads to it
    return f"/proc/{os.getpid()}/fd/{descriptor}", _reserved(descriptor, num_bytes, is_empty)


def _reserved(descriptor: int, num_bytes: int, is_empty: bool) -> int:
    """Reserves the room of a file, without which a write to its mapped bytes would end in SIGBUS -> inode."""
    os.posix_fallocate(descriptor, 0, num_bytes)
    if is_empty:
        os.ftruncate(descriptor, 0)
    return os.fstat(descriptor).st_ino


def open_file(path: str, inode: int) -> int | None:
    """Returns this process's descriptor of the file; None if it does not see it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if os.fstat(descriptor).st_ino == inode:
        return descriptor
    os.close(descriptor)  # the same path leads elsewhere here
    return None
