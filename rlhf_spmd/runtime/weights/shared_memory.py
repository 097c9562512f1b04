"""Memory that the ranks of one machine share, so that weights on the CPU need no sockets between them.

One file for each machine, in memory, with a part for each of its ranks; it has no name any more once all have mapped
it, so nothing is left behind however the job ends. Every page is reserved at once: a machine (or container) with too
little shared memory is found out here, and then there is no arena, rather than a bus error in the middle of a run.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

FOLDER = "/dev/shm"
NONCE_BYTES = 16
ALIGNED = 64  # bytes: parts begin where any number may


class Arena:
    """parts: world rank -> its bytes, uint8, the same memory in every process of the machine."""

    def __init__(self, parts: Mapping[int, Tensor]):
        self.parts = dict(parts)

    def holds(self, ranks: Sequence[int]) -> bool:
        """Whether all these ranks are on this machine."""
        return all(rank in self.parts for rank in ranks)

    @classmethod
    def make(cls, world, num_bytes: int) -> "Arena | None":
        """Every rank of the world says how many bytes it wants; collective. None where there is no such memory, on all
        ranks of a machine alike, or where nobody on it wants any."""
        if world.size == 1:
            return None
        on_cpu = world.device.type == "cpu" and os.path.isdir(FOLDER)
        rounded = -(-num_bytes // ALIGNED) * ALIGNED
        wanted = world.allgather(rounded if on_cpu else 0, "the size of shared memory")
        mine = [rank for rank in range(world.size) if world.nodes[rank] == world.nodes[world.rank]]
        size = sum(wanted[rank] for rank in mine)
        told = _reserve(size) if world.rank == mine[0] else ("", "")
        path, nonce = world.allgather(told, "the name of shared memory")[mine[0]]
        whole = _mapped(path, size, bytes.fromhex(nonce)) if path else None
        mapped = world.allgather(whole is not None, "shared memory")
        if world.rank == mine[0] and path:
            os.unlink(path)
        if not all(mapped[rank] for rank in mine):
            return None
        return cls(dict(zip(mine, whole.split([wanted[rank] for rank in mine]), strict=True)))


def _reserve(num_bytes: int) -> tuple[str, str]:
    """The path of a new file of so many bytes, and what it begins with; empty if there is no room, or no need."""
    if num_bytes == 0:
        return "", ""
    path, nonce = "", os.urandom(NONCE_BYTES)
    try:
        descriptor, path = tempfile.mkstemp(prefix="rlhf_spmd_", dir=FOLDER)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            os.pwrite(descriptor, nonce, 0)
        finally:
            os.close(descriptor)
    except OSError:
        if path:
            os.unlink(path)
        return "", ""
    return path, nonce.hex()


def _mapped(path: str, num_bytes: int, nonce: bytes) -> Tensor | None:
    """The file as a tensor; None if this rank does not see it: ranks that share memory need not share a folder."""
    try:
        with open(path, "rb") as file:  # torch would make a file that is missing
            if file.read(NONCE_BYTES) != nonce:
                return None
    except OSError:
        return None
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
