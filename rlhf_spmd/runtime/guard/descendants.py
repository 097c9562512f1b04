"""Ends what a process has started, and what that has started, whatever sessions and process groups they chose.

A process that has called `adopt` becomes the parent of orphans below it (PR_SET_CHILD_SUBREAPER). Ending its children
again and again until it has none therefore ends all: a parent first, so that it cannot replace a child that ends.
"""

import ctypes
import os
import signal
import time
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36
END_S = 5.0  # what does not end by then hangs in the kernel, or belongs to another user
PAUSE_S = 0.001


def adopt() -> None:
    """Makes this process the parent of orphans below it. Its children have to call this for themselves."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_all() -> None:
    """Sends SIGKILL to all descendants of this process, until none is left or END_S have passed."""
    until_s = time.monotonic() + END_S
    while time.monotonic() < until_s:
        for child in children_of(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # there is none
            return
        time.sleep(PAUSE_S)


def below(process: int) -> list[int]:
    """Returns the process ids of all descendants that a process has now, without those of a child that has ended."""
    parents, found = _parents(), [process]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def children_of(process: int) -> list[int]:
    """Returns the process ids of the children of a process, those that have ended and were not waited for included."""
    return [child for child, parent in _parents().items() if parent == process]


def _parents() -> dict[int, int]:
    """Returns the id of the parent of every process. Not every kernel has /proc/PID/task/*/children."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # it has ended
            found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    return found
