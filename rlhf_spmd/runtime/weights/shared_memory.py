"""Shared memory among the ranks of one machine, so that weights on the CPU need no sockets.

Each machine has one file in /dev/shm with a part for each of its ranks. The file is unlinked once all ranks have mapped
it, so nothing is left behind however the job ends. All pages are reserved at once: if a machine (or container) has too
little shared memory, no arena is made; otherwise the run would end with a bus error later.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlhf_spmd.runtime.failure.records import SHARED_MEMORY, prefix

NONCE_BYTES = 16
ALIGNED = 64  # bytes: the alignment of parts, sufficient for any dtype


class Arena:
    """parts: world rank -> its part, uint8, the same memory in every process of the machine."""

    def __init__(self, parts: Mapping[int, Tensor]):
        self.parts = dict(parts)

    def holds(self, ranks: Sequence[int]) -> bool:
        """Returns whether all these ranks are on this machine."""
        return all(rank in self.parts for rank in ranks)

    @classmethod
    def make(cls, world, num_bytes: int) -> "Arena | None":
        """Makes an arena with num_bytes for this rank. Collective over the world. None, on all ranks of a machine, if
        it has no such memory or none of its ranks needs any."""
        if world.size == 1:
            return None
        on_cpu = world.device.type == "cpu" and os.path.isdir(SHARED_MEMORY)
        rounded = -(-num_bytes // ALIGNED) * ALIGNED
        wanted = world.allgather(rounded if on_cpu else 0, "the size of shared memory")
        mine = [rank for rank in range(world.size) if world.nodes[rank] == world.nodes[world.rank]]
        size = sum(wanted[rank] for rank in mine)
        reserved = _reserve(size) if world.rank == mine[0] else ("", "")
        path, nonce = world.allgather(reserved, "the name of shared memory")[mine[0]]
        whole = _map(path, size, bytes.fromhex(nonce)) if path else None
        mapped = world.allgather(whole is not None, "shared memory")
        if world.rank == mine[0] and path:
            os.unlink(path)
        if whole is None or not all(mapped[rank] for rank in mine):
            return None
        return cls(dict(zip(mine, whole.split([wanted[rank] for rank in mine]), strict=True)))


def _reserve(num_bytes: int) -> tuple[str, str]:
    """Creates a file of num_bytes -> its path and the nonce it begins with; empty if there is no room or no need."""
    if num_bytes == 0:
        return "", ""
    path, nonce = "", os.urandom(NONCE_BYTES)
    try:
        with tempfile.NamedTemporaryFile(prefix=prefix(), dir=SHARED_MEMORY, delete=False) as file:
            path = file.name
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            file.write(nonce)
    except OSError:
        if path:
            os.unlink(path)
        return "", ""
    return path, nonce.hex()


def _map(path: str, num_bytes: int, nonce: bytes) -> Tensor | None:
    """Maps the file as a tensor; None if this rank does not see it, because ranks of a node need not share a folder."""
    try:
        with open(path, "rb") as file:  # torch would create a missing file
            if file.read(NONCE_BYTES) != nonce:
                return None
    except OSError:
        return None
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
