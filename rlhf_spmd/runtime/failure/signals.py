"""Handles SIGUSR1 and SIGTERM, which a batch system sends before it ends a job, at the end of an iteration.

SIGUSR1 requests a checkpoint, SIGTERM a checkpoint and the end of the run. A rank sends the signals it received in the
control message that ends an iteration, so a signal to any rank counts for all. MPICH's mpiexec forwards both to its
ranks and exits with their status. Until the first iteration SIGTERM ends a process immediately: there is nothing to
save, and waiting for a peer that died at start-up would hang.
"""

import os
from collections.abc import Callable
from signal import SIG_DFL, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, Signals, signal
from types import FrameType

INTERRUPTED = "interrupted by SIGINT"  # the message of a rank that was
TERMINATED_STATUS, INTERRUPTED_STATUS = 128 + SIGTERM, 128 + SIGINT  # as a shell shows them
CHECKPOINT, END = SIGUSR1, SIGTERM
ASKED_BY = frozenset({SIGTERM, SIGINT, SIGHUP, SIGQUIT})  # intended ends

_handled: set[Signals] = set()


def handle(number: Signals, handler: Callable[[int, FrameType | None], object]) -> None:
    """Sets the handler of a signal for this process alone: what it forks is ended by the signal, as a pool of
    multiprocessing must be."""
    if not _handled:
        os.register_at_fork(after_in_child=_in_child)
    _handled.add(number)
    signal(number, handler)


def _in_child() -> None:
    for number in _handled:
        signal(number, SIG_DFL)


class Asked:
    """The signals that this process has received."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def listen(self, number: Signals) -> None:
        """Records this signal from now on, and does nothing else; call it in the main thread."""
        handle(number, lambda number, frame: self._seen.add(Signals(number).name))

    @property
    def any(self) -> bool:
        """Whether there are signals that nobody has taken."""
        return bool(self._seen)

    def take(self) -> list[str]:
        """Returns the names of the signals received since the last call."""
        names = sorted(self._seen)
        self._seen.difference_update(names)
        return names


def signal_name(number: int) -> str:
    """Returns the name of a signal: `SIGKILL` for 9."""
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"
