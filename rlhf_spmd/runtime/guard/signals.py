"""Handles SIGUSR1 and SIGTERM, which a batch system sends before it ends a job, at the end of an iteration.

SIGUSR1 requests a checkpoint, SIGTERM a checkpoint and the end of the run. A rank sends the signals it received in the
control message that ends an iteration, so a signal to any rank counts for all. MPICH's mpiexec forwards both to its
ranks and exits with their status. Until the first iteration SIGTERM ends a process immediately: there is nothing to
save, and waiting for a peer that died at start-up would hang.
"""

from signal import SIGTERM, SIGUSR1, Signals, signal

TERMINATED_STATUS = 128 + SIGTERM  # the status that a shell shows for a program ended by SIGTERM
CHECKPOINT, END = SIGUSR1, SIGTERM


class Asked:
    """The signals that this process has received."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def listen(self, number: Signals) -> None:
        """From now on this signal is only recorded; call it in the main thread."""
        signal(number, lambda number, frame: self._seen.add(Signals(number).name))

    def take(self) -> list[str]:
        """The names of the signals received since the last call."""
        names = sorted(self._seen)
        self._seen.difference_update(names)
        return names


def name_of(number: int) -> str:
    """`SIGKILL` for 9."""
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"
