"""SIGUSR1 and SIGTERM, remembered until the end of an iteration: what a batch system sends before it ends a job.

SIGUSR1 asks for a checkpoint, SIGTERM for a checkpoint and the end. A rank says in the closing message of an iteration
which of them reached it, so one that reached any rank counts for all. MPICH's mpiexec passes both on to its ranks and
ends with their status. As long as nothing has been computed SIGTERM ends a process as ever: there is nothing to save,
and a peer that died while it started must not be waited for.
"""

from signal import SIGTERM, SIGUSR1, Signals, signal

TERMINATED_STATUS = 128 + SIGTERM  # as a shell shows a program that SIGTERM ended
CHECKPOINT, END = SIGUSR1, SIGTERM


class Asked:
    """What this process has been sent."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def listen(self, number: Signals) -> None:
        """From now on this signal ends nothing; called in the main thread."""
        signal(number, lambda number, frame: self._seen.add(Signals(number).name))

    def take(self) -> list[str]:
        """The names of the signals since the last time."""
        names = sorted(self._seen)
        self._seen.difference_update(names)
        return names
