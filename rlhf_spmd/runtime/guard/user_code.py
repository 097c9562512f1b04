"""Calls code of the user inside this process, and ends a child of os.fork that comes back from the call.

Such a child must not touch this process's connections. What user code changes of the process, such as the working
folder or settings of torch, stays changed. Loads neither torch nor MPI.
"""

import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from rlhf_spmd.runtime.guard import signals, streams

NOTE = "rlhf_spmd: note: "
FORKED = "came back in a child of os.fork, too, which was ended: end a child by os._exit in the function"

_has_said = mmap.mmap(-1, 1)  # shared with children: whether one has said that it was ended


class Notes:
    """What has been said about user code in this process, each note once; of the ranks of a node one says it."""

    def __init__(self) -> None:
        self.said: set[str] = set()
        self.may: Callable[[str], bool] = lambda text: True

    def say_if(self, may: Callable[[str], bool]) -> None:
        """Sets which notes are said: those that `may` allows."""
        self.may = may

    def tell(self, text: str) -> None:
        """Says a note once."""
        if text not in self.said and self.may(text):
            streams.say(NOTE + text)
        self.said.add(text)


notes = Notes()


@contextmanager
def guarded(who: str) -> Iterator[None]:
    """Runs the block, one call of user code, and ends a child of os.fork that comes back from it, with a note. who: for
    the note, e.g. `reward function r.py:f`."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            _end_child(who)


def _end_child(who: str) -> NoReturn:
    """Ends this process, which is such a child. Runs nothing that it inherited: no handlers of exits, no buffers of
    streams."""
    error, status = sys.exception(), 1
    try:
        if isinstance(error, SystemExit):  # it meant to end
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif not _has_said[0]:
            _has_said[0] = 1
            if notes.may(text := f"{who} {FORKED}"):
                os.write(streams.ERRORS, f"{NOTE}{text}\n".encode(errors="backslashreplace"))
    finally:
        os._exit(status & 0xFF)


def pass_on_interrupt(error: BaseException) -> None:
    """Raises an error of user code again if it is the user's wish to end the program."""
    if isinstance(error, KeyboardInterrupt) and signals.interrupted():
        raise error
