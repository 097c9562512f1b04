"""Control messages over MPI: small, collective over all ranks, with a deadline.

The only primitive is `exchange`, an all-gather of bytes. Broadcasts and barriers are exchanges too, so all messages
have one format, and two ranks that meet at different places of the program learn the other's place instead of hanging
or mixing their bytes. An exchange can also carry a failure, so a rank that fails in the middle of a block reaches the
others wherever they are in it.

Waits are non-blocking collectives, polled with short sleeps (a blocking MPI call spins and starves the other ranks of a
small machine). Each rank publishes the number of its exchange with its position (records.py), so a rank that is
stopped, stuck or gone is identified without its help, and no message is left on the communicator: MPICH's MPI_Finalize
fails if there is one.

This file does not import mpi4py; the communicator comes from world.py.
"""

import struct
import time
from collections.abc import Callable

from rlhf_spmd.runtime.failure.failures import Failed, Late
from rlhf_spmd.runtime.failure.records import Positions, Record

BLOCK = 512  # bytes per rank in the first round; longer messages take a second one
HEADER = struct.Struct("<q i ? 63s")  # sequence number, length of the message, whether it is a failure, its name
INLINE = BLOCK - HEADER.size
EXTENSIONS = 20  # a wait for an active rank is extended by 1 / EXTENSIONS of the deadline at a time
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 1e-3  # between two polls; in between, 1/20 of the time waited so far


class Control:
    """The control messages of one communicator, which must not be used for anything else."""

    def __init__(self, comm, record: Record, *, deadline_s: float):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.record, self.deadline_s = record, deadline_s
        self.positions: Positions | None = None  # once the ranks have met
        self.unfinished: list = []  # requests (with their buffers) that must outlive their call
        self.may_arrive: Callable[[tuple[int, ...]], bool] = lambda late: False  # whether a late rank is still active
        self.longest_wait = 1  # deadlines to wait for active ranks

    def exchange(
        self, what: str, message: bytes, *, failed: bool = False, deadline_s: float | None = None
    ) -> list[bytes]:
        """All-gathers the messages, in rank order.

        Raises Late on expiry, and Failed on all ranks if any of them passed `failed`, even if others are elsewhere.
        """
        if self.size == 1:
            if failed:
                raise Failed({0: message})
            return [message]
        self.record.now.sequence += 1
        header = HEADER.pack(self.record.now.sequence, len(message), failed, what.encode()[:63])
        block, blocks = (header + message[:INLINE]).ljust(BLOCK, b"\0"), bytearray(BLOCK * self.size)
        self._wait(self.comm.Iallgather(block, blocks), (block, blocks), what, deadline_s)
        headers = [HEADER.unpack_from(blocks, BLOCK * rank) for rank in range(self.size)]
        lengths = [length for _, length, _, _ in headers]
        starts = [BLOCK * rank + HEADER.size for rank in range(self.size)]
        if max(lengths) > INLINE:
            starts = [sum(lengths[:rank]) for rank in range(self.size)]
            blocks = bytearray(sum(lengths))
            request = self.comm.Iallgatherv([message, "B"], [blocks, (lengths, starts), "B"])
            self._wait(request, (message, blocks), what, deadline_s)
        messages = [bytes(blocks[start : start + length]) for start, length in zip(starts, lengths, strict=True)]
        failures = {rank: messages[rank] for rank, header in enumerate(headers) if header[2]}
        if failures:
            raise Failed(failures)
        met = [
            f"message {number}, {text.rstrip(bytes(1)).decode(errors='replace')!r}" for number, _, _, text in headers
        ]
        assert len(set(met)) == 1, "ranks met at different points of the program: " + ", ".join(
            f"rank {rank} in {place}" for rank, place in enumerate(met)
        )
        return messages

    def _wait(self, request, buffers, what: str, deadline_s: float | None) -> None:
        longest_s = self.deadline_s * self.longest_wait if deadline_s is None else deadline_s
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        extension_s, start = deadline_s / EXTENSIONS, time.monotonic()
        while not request.Test():
            waited_s = time.monotonic() - start
            if waited_s > deadline_s:
                late = self.late()
                if deadline_s < longest_s and self.may_arrive(late):
                    deadline_s = min(waited_s + extension_s, longest_s)
                    continue
                self.unfinished.append((request, buffers))
                raise Late(what, late, waited_s)
            time.sleep(min(max(waited_s / 20, SHORTEST_PAUSE_S), LONGEST_PAUSE_S))

    def late(self) -> tuple[int, ...]:
        """Returns the ranks that have not begun this exchange. If all whose positions can be read have begun it, the
        others: those of other nodes before torch.distributed connects them."""
        positions = self.positions.read(tuple(range(self.size))) if self.positions is not None else {}
        sequence = self.record.now.sequence
        late = tuple(rank for rank, position in positions.items() if position.sequence < sequence)
        return late or tuple(rank for rank in range(self.size) if rank != self.rank and rank not in positions)
