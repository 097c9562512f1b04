"""Handles SIGUSR1 and SIGTERM, which a batch system sends before it ends a job, at the end of an iteration.

SIGUSR1 requests a checkpoint, SIGTERM a checkpoint and the end of the run. A rank sends the signals it received in the
control message that ends an iteration, so a signal to any rank counts for all. MPICH's mpiexec forwards both to its
ranks and exits with their status. Until the first iteration SIGTERM ends a process immediately: there is nothing to
save, and waiting for a peer that died at start-up would hang.
"""

from signal import SIGINT, SIGTERM, SIGUSR1, Signals, default_int_handler, getsignal, signal

TERMINATED_STATUS = 128 + SIGTERM  # the status that a shell shows for a program ended by SIGTERM
CHECKPOINT, END = SIGUSR1, SIGTERM
# whose handlers the program depends on; SIGCHLD and SIGPIPE: on those that Python starts with
USED = tuple(Signals[f"SIG{name}"] for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "CHLD", "PIPE"))


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


_interrupts: list[int] = []  # SIGINTs that this process has received


def remember_interrupts() -> None:
    """From now on `interrupted` tells whether a SIGINT arrived; call it in the main thread. SIGINT still raises
    KeyboardInterrupt, unless this process was started to ignore it."""
    if getsignal(SIGINT) is default_int_handler:
        signal(SIGINT, _interrupt)


def _interrupt(number, frame) -> None:
    _interrupts.append(number)
    default_int_handler(number, frame)


def interrupted() -> bool:
    """Whether a SIGINT arrived. Without `remember_interrupts` any KeyboardInterrupt must be taken for one."""
    return bool(_interrupts) or getsignal(SIGINT) is default_int_handler
