"""What ranks tell each other during a chain of iterations, without meeting (plan/program/chain.py).

Each rank sends rank 0 what it counted in an iteration, and goes on. Rank 0 tells all others, when it begins an
iteration, whether the chain is drained after it; they ask at its end, so that no rank gets far ahead of rank 0. Some
ranks agree on the state of the next iteration. Waits are tests and sleeps, as in control_messages.py; a rank that does
not answer is found by the watch. This file does not import mpi4py; the communicator is its own.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

REPORT, LAST, STATE = range(3)  # tags
LONGEST_PAUSE_S = 1e-3


class Reports:
    """The messages of one rank."""

    def __init__(self, comm: Any):
        """comm: an MPI communicator that nothing else uses."""
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.sent: list[Any] = []  # requests that are not known to be over
        self.coming: list[Any] = []  # reports on their way; on rank 0
        self.come: dict[int, dict[int, bytes]] = {}  # iteration -> rank -> its report; on rank 0

    def send(self, number: int, report: bytes) -> None:
        """Sends what this rank counted in an iteration to rank 0."""
        self._send((self.rank, number, report), 0, REPORT)

    def arrived(self, number: int) -> list[bytes] | None:
        """Returns on rank 0 the reports of all ranks of an iteration; None: some have not come."""
        while (message := self.comm.improbe(tag=REPORT)) is not None:
            self.coming.append(message.irecv())  # a long one may need its sender, which computes
        tested = [(request, *request.test()) for request in self.coming]
        self.coming = [request for request, is_over, _ in tested if not is_over]
        for rank, of_iteration, report in (value for _, is_over, value in tested if is_over):
            self.come.setdefault(of_iteration, {})[rank] = report
        found = self.come.get(number, {})
        if len(found) < self.size:
            return None
        del self.come[number]
        return [found[rank] for rank in range(self.size)]

    def all_of(self, number: int) -> list[bytes]:
        """Waits on rank 0 for the reports of an iteration, in rank order."""
        return _when(lambda: self.arrived(number))

    def tell(self, is_last: bool) -> None:
        """Tells all ranks, on rank 0 at the beginning of an iteration, whether the chain is drained after it."""
        for rank in range(self.size):
            self._send(is_last, rank, LAST)

    def told(self) -> bool:
        """Waits for what rank 0 tells of the iteration that ends here."""
        return bool(self._receive(0, LAST))

    def merge(self, ranks: Sequence[int], value: Any, merged: Callable[[Sequence[Any]], Any]) -> Any:
        """Merges the values of some ranks, in their order, and returns the result on all of them. Collective over them.
        Values must be short: a long message needs its sender, which may compute."""
        first, *others = ranks
        if self.rank != first:
            self._send(value, first, STATE)
            return self._receive(first, STATE)
        result = merged([value, *(self._receive(other, STATE) for other in others)])
        for other in others:
            self._send(result, other, STATE)
        return result

    def _send(self, value: Any, rank: int, tag: int) -> None:
        self.sent = [request for request in self.sent if not request.test()[0]]
        self.sent.append(self.comm.isend(value, dest=rank, tag=tag))

    def _receive(self, rank: int, tag: int) -> Any:
        """Waits for a message."""
        return _when(lambda: self.comm.improbe(source=rank, tag=tag)).recv()

    def finish(self) -> None:
        """Waits until all that this rank sent has been received."""
        _when(lambda: all(request.test()[0] for request in self.sent) or None)
        self.sent.clear()


def _when(test: Callable[[], Any]) -> Any:
    """Returns the result of a test once it is not None; sleeps in between."""
    pause_s = 2e-5
    while (found := test()) is None:
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
    return found
