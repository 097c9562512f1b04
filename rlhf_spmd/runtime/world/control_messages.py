"""Control messages over MPI: small, collective over all ranks, with a deadline.

The only primitive is `exchange`, an all-gather of bytes. Broadcasts and barriers are exchanges too, so all messages
have one format, and two ranks that meet at different places of the program learn the other's place instead of hanging
or mixing their bytes. An exchange can also carry a failure, so a rank that fails in the middle of a block reaches the
others wherever they are in it.

Waits are non-blocking collectives, polled with short sleeps (a blocking MPI call spins and starves the other ranks of a
small machine). A rank that has waited for a while starts a roll call: it sends its sequence number to all others and
notes whose number arrives. Only waiting ranks answer, so a rank that is stopped, stuck or gone is identified without
its help, shared memory or a store. Roll calls may arrive after their receiver has continued, so `settle` must be called
before a communicator is abandoned; it receives them all.

This file does not import mpi4py; the communicator comes from world.py.
"""

import struct
import time
from collections.abc import Callable

from rlhf_spmd.runtime.failure.failures import Failed, Late

BLOCK = 512  # bytes per rank in the first round; longer messages take a second one
HEADER = struct.Struct("<q i ? 63s")  # sequence number, length of the message, whether it is a failure, its name
INLINE = BLOCK - HEADER.size
PLACE = struct.Struct("<q i")  # sequence number, rank
COUNT = struct.Struct("<q")
EXTENSIONS = 20  # a wait for an active rank is extended by 1 / EXTENSIONS of the deadline at a time
ROLL_CALL_S = 1.0  # wait before a roll call (at most half the deadline)
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 1e-3  # between two polls; in between, 1/20 of the time waited so far


class Control:
    """The control messages of one communicator, which must not be used for anything else."""

    def __init__(self, comm, *, deadline_s: float):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.deadline_s = deadline_s
        self.sequence = 0
        self.places = [0] * self.size  # the last sequence number received from every rank
        self.num_sent, self.num_received = [0] * self.size, [0] * self.size  # roll calls to and from every rank
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
        """Receives the roll calls still on their way to this rank. Collective.

        MPICH's MPI_Finalize fails if messages on COMM_WORLD have not been received, and mpiexec then kills the other
        ranks, or they wait for ever. Raises Late.
        """
        if self.size == 1:
            return
        what, start, size = "the last roll calls", time.monotonic(), COUNT.size * self.size
        mine, counts = b"".join(map(COUNT.pack, self.num_sent)), bytearray(size * self.size)
        self.sequence += 1
        self._wait(self.comm.Iallgather(mine, counts), (mine, counts), what, None, calls_roll=False)
        expected = [COUNT.unpack_from(counts, size * rank + COUNT.size * self.rank)[0] for rank in range(self.size)]
        while True:
            self._receive_roll_calls()
            self.unfinished = [pending for pending in self.unfinished if not pending[0].Test()]
            if self.num_received == expected and not self.unfinished:
                return
            waited_s = time.monotonic() - start
            if waited_s > self.deadline_s:
                raise Late(what, tuple(r for r in range(self.size) if self.num_received[r] < expected[r]), waited_s)
            time.sleep(LONGEST_PAUSE_S)

    def _wait(self, request, buffers, what: str, deadline_s: float | None, *, calls_roll: bool = True) -> None:
        longest_s = self.deadline_s * self.longest_wait if deadline_s is None else deadline_s
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        roll_s, extension_s = min(ROLL_CALL_S, deadline_s / 2), deadline_s / EXTENSIONS
        start, answered = time.monotonic(), False
        while not request.Test():
            waited_s = time.monotonic() - start
            self._receive_roll_calls()
            if calls_roll and not answered and (waited_s > roll_s or self.sequence in self.places):
                self._send_roll_call()
                answered = True
            if waited_s > deadline_s:
                late = tuple(r for r in range(self.size) if self.places[r] < self.sequence and r != self.rank)
                if deadline_s < longest_s and self.may_arrive(late):
                    deadline_s = min(waited_s + extension_s, longest_s)
                    continue
                self.unfinished.append((request, buffers))
                raise Late(what, late, waited_s)
            time.sleep(min(max(waited_s / 20, SHORTEST_PAUSE_S), LONGEST_PAUSE_S))

    def _receive_roll_calls(self) -> None:
        while (probe := self.comm.Improbe()) is not None:
            place = bytearray(PLACE.size)
            probe.Recv([place, "B"])
            number, rank = PLACE.unpack(place)
            self.places[rank] = max(self.places[rank], number)
            self.num_received[rank] += 1

    def _send_roll_call(self) -> None:
        self.unfinished = [pending for pending in self.unfinished if not pending[0].Test()]
        place = PLACE.pack(self.sequence, self.rank)
        for other in range(self.size):
            if other != self.rank:
                self.unfinished.append((self.comm.Isend([place, "B"], other), place))
                self.num_sent[other] += 1
