"""Standard input, output and error as the program uses them: always there, and never the reason why work is lost.

A descriptor from 0 to 2 that is closed at the start would be given to the next file that is opened, and prints would go
into that file; so /dev/null takes its place. What a stream's encoding lacks is printed as an escape, and so are control
characters, because anything that is printed may hold text of a model, a file or another user. On ranks the work is
training, not the console: if standard output can't be written (its reader has left, its disk is full), the run goes on
without it. A message about an error is written to descriptor 2 itself, whatever became of sys.stderr. One line may be
shown that the next output replaces (progress.py). No torch, no MPI.
"""

import io
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.printing import printable

INPUT, OUTPUT, ERRORS = range(3)
WRITE_S = 5.0  # a message or a flush waits this long for a reader that has stopped
ERASE = "\r\x1b[K"  # takes away what is on the line of the cursor

_lock = threading.RLock()  # held while our streams write
_passing = ""  # the line that the next output replaces
_wrote_s = time.monotonic()  # when one of our streams was last written to


def prepare(*, is_work: bool, speaks: bool = True) -> None:
    """Opens /dev/null for descriptors 0 to 2 that are closed, and replaces sys.stdout and sys.stderr. Call it first.

    is_work: what is printed is the work of this process, so an output that can't be written ends it: with
    BrokenPipeError if the reader has left, else UserError. Otherwise it goes on without, and says so once if it speaks.
    """
    missing = [descriptor for descriptor in (INPUT, OUTPUT, ERRORS) if not _is_open(descriptor)]
    for descriptor in missing:  # ascending: each gets the lowest free number, which is its own
        _open_nowhere(descriptor)

    def lost(error: OSError) -> None:
        _silence(OUTPUT)
        if is_work and isinstance(error, BrokenPipeError):
            raise error
        if is_work:
            raise UserError(f"standard output can't be written ({error.strerror}): print to another file or disk")
        without(error.strerror or str(error), speaks=speaks)

    sys.stdout = _stream(OUTPUT, lost, sys.stdout)
    sys.stderr = _stream(ERRORS, lambda error: _silence(ERRORS), sys.stderr)
    if OUTPUT in missing and not is_work:
        without("it is closed", speaks=speaks)


def without(reason: str, *, speaks: bool = True) -> None:
    """Says that the run goes on without a console. Flushes nothing: the caller may be about to."""
    if speaks:
        _speak(f"rlhf_spmd: note: standard output can't be written ({reason}): the run goes on without it")


def is_terminal(stream: TextIO | None) -> bool:
    """Returns whether a stream is open and shows on a terminal."""
    with suppress(OSError, ValueError):
        return stream is not None and stream.isatty()
    return False


class Styled(str):
    """Text with escapes of our own, which is printed as it is."""

    @classmethod
    def of(cls, text: str, style: str, reset: str) -> "Styled":
        """Returns a text between two escapes."""
        return cls(style + printable(text) + reset)

    @classmethod
    def joined(cls, *parts: str) -> "Styled":
        """Joins styled and other texts."""
        return cls("".join(part if isinstance(part, Styled) else printable(part) for part in parts))


def put(text: str, stream: TextIO | None) -> bool:
    """Prints a line -> whether a further one may be printed: a stream that a function has closed takes no more."""
    if stream is None:  # a function has set it so
        return False
    encoding = getattr(stream, "encoding", None) or "utf-8"  # of a stream that need not be ours
    try:
        line = Styled.joined(text, "\n").encode(encoding, "backslashreplace").decode(encoding)
        stream.write(Styled(line))
        stream.flush()
    except (OSError, ValueError) as error:
        without(str(error))
        return False
    return True


def show_passing(text: str) -> None:
    """Shows a line on standard output that the next output replaces; empty: takes it away. Only for a terminal that no
    other process writes to. Never raises."""
    global _passing
    stream = sys.stdout
    with _lock, suppress(OSError, ValueError, UserError):
        if isinstance(stream, _Text) and (text or _passing):
            io.TextIOWrapper.write(stream, ERASE + printable(text))
            stream.flush()
            _passing = text


def silent_s() -> float:
    """Returns the seconds for which our streams have not been written to, except for the passing line."""
    return time.monotonic() - _wrote_s


def _in_child() -> None:
    """Renews the lock after a fork, since another thread may have held it. The parent takes its line away."""
    global _lock, _passing
    _lock, _passing = threading.RLock(), ""


os.register_at_fork(after_in_child=_in_child)


def say(text: str) -> None:
    """Writes a line to descriptor 2, after what was printed before. Never raises."""
    flush()
    _speak(text)


def flush() -> None:
    """Writes what sys.stdout and sys.stderr still hold. Never raises."""
    _in_time(_flush)


def _speak(text: str) -> None:
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    with suppress(Exception):
        line = (printable(text) + "\n").encode(encoding, "backslashreplace")
        _in_time(lambda: _write(line))


def _flush() -> None:
    show_passing("")
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # None, closed, or replaced by anything
            stream.flush()


def _write(line: bytes) -> None:
    with suppress(OSError):
        while line:
            select.select([], [ERRORS], [])  # another process may have made it non-blocking
            line = line[os.write(ERRORS, line) :]


def _in_time(action: Callable[[], None]) -> None:
    """Does something that may wait for a reader, for WRITE_S at most. It must not raise."""
    thread = threading.Thread(target=action, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no further thread may start
        action()
    else:
        thread.join(WRITE_S)


class _Output(io.FileIO):
    """A descriptor that takes all it is given. Errors are handed to `lost`; if that returns, the rest is dropped."""

    def __init__(self, descriptor: int, lost: Callable[[OSError], None]):
        super().__init__(descriptor, "w", closefd=False)
        self._lost = lost

    def write(self, data) -> int:
        rest = memoryview(data)
        try:
            while rest:
                count = super().write(rest)
                if count is None:  # another process has made it non-blocking
                    select.select([], [self], [])
                rest = rest[count or 0 :]
        except OSError as error:
            self._lost(error)
        return len(data)


class _Text(io.TextIOWrapper):
    """A stream that stays open when a function closes it, and that shows control characters as escapes."""

    def write(self, text: str) -> int:
        global _wrote_s
        with _lock:
            show_passing("")
            _wrote_s = time.monotonic()
            super().write(text if isinstance(text, Styled) else printable(text))
        return len(text)

    def close(self) -> None:
        self.flush()


def _stream(descriptor: int, lost: Callable[[OSError], None], before: TextIO | None) -> TextIO:
    """Returns the text stream of a descriptor. before: Python's own, None if the descriptor was closed."""
    raw = _Output(descriptor, lost)
    at_once = getattr(before, "write_through", False)  # python -u
    return _Text(
        raw if at_once else io.BufferedWriter(raw),
        encoding=getattr(before, "encoding", None) or "utf-8",
        errors="backslashreplace",
        line_buffering=descriptor == ERRORS or raw.isatty(),
        write_through=at_once,
    )


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _open_nowhere(descriptor: int) -> None:
    with suppress(OSError):
        opened = os.open(os.devnull, os.O_RDONLY if descriptor == INPUT else os.O_WRONLY)
        os.set_inheritable(opened, True)


def _silence(descriptor: int) -> None:
    """Drops from now on what is written to a descriptor."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        if nowhere != descriptor:
            os.close(nowhere)
