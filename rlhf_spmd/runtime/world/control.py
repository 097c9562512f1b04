"""Control messages over MPI: small, agreed by all ranks, and never waited for longer than a deadline.

There is one primitive, `exchange`: every rank gives some bytes and gets those of all ranks. Broadcasts and barriers are
exchanges too, so every message on the wire has one shape, and two ranks that meet in different places of the program
learn where the other is instead of hanging or mixing their bytes. An exchange can also carry a failure, so that a rank
that gives up in the middle of a block reaches the others wherever they are in it.

The waits are non-blocking collectives, polled with short sleeps (a blocking MPI call spins, which starves the other
ranks of a small machine). Whoever has waited for a while calls the roll: it sends its place to all others and notes
whose place arrived. Only ranks that themselves wait here answer, so a rank that is stopped, stuck or gone is named
whatever the reason; this needs no help from it, no shared memory and no store. Roll calls may arrive when their
receiver has gone on, so whoever ends the use of a communicator calls `settle`, which receives them all.

No import of mpi4py: the communicator comes from world.py.
"""

import struct
import time
from collections.abc import Callable

from rlhf_spmd.runtime.guard.failures import Failed, Late

BLOCK = 512  # bytes per rank that travel in the first round; longer messages take a second one
HEADER = struct.Struct("<q i ? 63s")  # sequence number, length of the message, whether it is a failure, what it is
INLINE = BLOCK - HEADER.size
PLACE = struct.Struct("<q i")  # sequence number, rank
COUNT = struct.Struct("<q")
EXTENSIONS = 20  # of a deadline: a wait for a rank that is only slow goes on by such a part of it
ROLL_CALL_S = 1.0  # begin to call the roll after so long (or half the deadline)
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 1e-3  # between two polls: a twentieth of the time waited so far


class Control:
    """The control messages of one communicator; `comm` must be used by nothing else."""

    def __init__(self, comm, *, deadline_s: float):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.deadline_s = deadline_s
        self.sequence = 0
        self.places = [0] * self.size  # the last place heard of every rank
        self.num_told, self.num_heard = [0] * self.size, [0] * self.size  # roll calls to and from every rank
        self.unfinished: list = []  # requests (with their buffers) that must outlive their call
        self.may_come: Callable[[tuple[int, ...]], bool] = lambda late: False  # whether one of the late is only slow
        self.longest_wait = 1  # deadlines, if one is

    def exchange(
        self, what: str, message: bytes, *, failed: bool = False, deadline_s: float | None = None
    ) -> list[bytes]:
        """Gives every rank's message to every rank, in rank order.

        Raises Late on expiry, and Failed on all ranks if any of them passed `failed`, whatever the others were about.
        """
        if self.size == 1:
            if failed:
                raise Failed({0: message})
            return [message]
        self.sequence += 1
        label = what.encode()[:63]
        mine = (HEADER.pack(self.sequence, len(message), failed, label) + message[:INLINE]).ljust(BLOCK, b"\0")
        blocks = bytearray(BLOCK * self.size)
        self._wait(self.comm.Iallgather(mine, blocks), (mine, blocks), what, deadline_s)
        headers = [HEADER.unpack_from(blocks, BLOCK * rank) for rank in range(self.size)]
        lengths = [header[1] for header in headers]
        if max(lengths) <= INLINE:
            starts = [BLOCK * rank + HEADER.size for rank in range(self.size)]
        else:
            starts = [sum(lengths[:rank]) for rank in range(self.size)]
            blocks = bytearray(sum(lengths))
            request = self.comm.Iallgatherv([message, "B"], [blocks, (lengths, starts), "B"])
            self._wait(request, (message, blocks), what, deadline_s)
        messages = [bytes(blocks[start : start + length]) for start, length in zip(starts, lengths, strict=True)]
        failures = {rank: messages[rank] for rank, header in enumerate(headers) if header[2]}
        if failures:
            raise Failed(failures)
        met = [(header[0], header[3]) for header in headers]
        assert len(set(met)) == 1, "ranks met in different places of the program: " + ", ".join(
            f"rank {rank} in message {number}, {text.rstrip(bytes(1)).decode(errors='replace')!r}"
            for rank, (number, text) in enumerate(met)
        )
        return messages

    def settle(self) -> None:
        """Receives what other ranks' roll calls have left on the way to this one; all ranks call it together.

        MPICH's MPI_Finalize fails if messages on COMM_WORLD have not been received. mpi4py does not report that at the
        exit, and mpiexec kills all other ranks when the rank leaves (or they wait for it in MPI_Finalize for ever).
        Raises Late.
        """
        if self.size == 1:
            return
        what, start, size = "the last roll calls", time.monotonic(), COUNT.size * self.size
        mine, counts = b"".join(map(COUNT.pack, self.num_told)), bytearray(size * self.size)
        self.sequence += 1
        self._wait(self.comm.Iallgather(mine, counts), (mine, counts), what, None, calls_roll=False)
        told = [COUNT.unpack_from(counts, size * rank + COUNT.size * self.rank)[0] for rank in range(self.size)]
        while True:
            self._hear()
            self.unfinished = [pending for pending in self.unfinished if not pending[0].Test()]
            if self.num_heard == told and not self.unfinished:
                return
            waited_s = time.monotonic() - start
            if waited_s > self.deadline_s:
                raise Late(what, tuple(r for r in range(self.size) if self.num_heard[r] < told[r]), waited_s)
            time.sleep(LONGEST_PAUSE_S)

    def _wait(self, request, buffers, what: str, deadline_s: float | None, *, calls_roll: bool = True) -> None:
        longest_s = self.deadline_s * self.longest_wait if deadline_s is None else deadline_s
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        roll_s, extension_s = min(ROLL_CALL_S, deadline_s / 2), deadline_s / EXTENSIONS
        start, answered = time.monotonic(), False
        while not request.Test():
            waited_s = time.monotonic() - start
            self._hear()
            if calls_roll and not answered and (waited_s > roll_s or self.sequence in self.places):
                self._tell()
                answered = True
            if waited_s > deadline_s:
                late = tuple(r for r in range(self.size) if self.places[r] < self.sequence and r != self.rank)
                if deadline_s < longest_s and self.may_come(late):
                    deadline_s = min(waited_s + extension_s, longest_s)
                    continue
                self.unfinished.append((request, buffers))
                raise Late(what, late, waited_s)
            time.sleep(min(max(waited_s / 20, SHORTEST_PAUSE_S), LONGEST_PAUSE_S))

    def _hear(self) -> None:
        while (probe := self.comm.Improbe()) is not None:
            place = bytearray(PLACE.size)
            probe.Recv([place, "B"])
            number, rank = PLACE.unpack(place)
            self.places[rank] = max(self.places[rank], number)
            self.num_heard[rank] += 1

    def _tell(self) -> None:
        self.unfinished = [pending for pending in self.unfinished if not pending[0].Test()]
        place = PLACE.pack(self.sequence, self.rank)
        for other in range(self.size):
            if other != self.rank:
                self.unfinished.append((self.comm.Isend([place, "B"], other), place))
                self.num_told[other] += 1
