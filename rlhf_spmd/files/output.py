"""Standard output and error: control characters as escapes, the width of lines, and outputs that can't be written.

Anything that is printed may hold text of a model, a file or another user, so control characters, and what the encoding
lacks, are printed as escapes. On ranks the work is training, not the console: if standard output can't be written (its
reader has left, its disk is full), the run goes on without it. Errors are written to descriptor 2 itself, whatever
became of sys.stderr. One line may be shown that the next output replaces (progress.py).
"""

import io
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.printing import printable

ERRORS = 2  # the descriptor
FLUSH_S = 5.0  # for a reader that has stopped
ERASE = "\r\x1b[K"  # takes away what is on the line of the cursor
NOTE = "rlhf_spmd: note: "


class Stream(io.TextIOWrapper):
    """A standard stream. is_work: an output that can't be written ends the process; otherwise it goes on without.
    speaks: it then prints a note."""

    is_work, speaks = False, False
    passing = ""  # the line that the next output replaces
    wrote_s = 0.0  # when it was last written to, or made, but for the passing line

    def write(self, text: str) -> int:
        self.show_passing("")
        self.wrote_s = time.monotonic()
        with self._may_be_lost():
            super().write(printable(text))
        return len(text)

    def flush(self) -> None:
        with self._may_be_lost():
            super().flush()

    def show_passing(self, text: str) -> None:
        """Shows a line that the next output replaces; empty: takes it away. Only for a terminal that no other process
        writes to."""
        if text or self.passing:
            self.passing = text
            super().write(ERASE + printable(text))
            self.flush()

    @contextmanager
    def _may_be_lost(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if self.is_work and isinstance(error, BrokenPipeError):
                raise
            if self.is_work:
                text = f"standard output can't be written ({error.strerror}): print to another file or disk"
                raise UserError(text) from error
            if self.speaks:
                _go_on_without(error.strerror)


def prepare(*, is_work: bool, speaks: bool = True) -> None:
    """Replaces sys.stdout and sys.stderr. Call it first.

    is_work: what is printed is the work of this process, so an output that can't be written ends it: with
    BrokenPipeError if the reader has left, else UserError. Otherwise it goes on without, and says so once if it speaks.
    """
    is_closed = sys.stdout is None
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: its number would be given to the next file, which would get what is printed
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
    for name, descriptor in (("stdout", 1), ("stderr", ERRORS)):
        before: Any = getattr(sys, name)
        raw = io.FileIO(descriptor, "w", closefd=False)
        at_once = getattr(before, "write_through", False)
        encoding = before.encoding if before else "utf-8"
        is_line = name == "stderr" or raw.isatty()
        stream = Stream(
            raw if at_once else io.BufferedWriter(raw), encoding, "backslashreplace", None, is_line, at_once
        )
        stream.wrote_s = time.monotonic()
        stream.is_work, stream.speaks = is_work and name == "stdout", speaks
        setattr(sys, name, stream)
    if is_closed and speaks and not is_work:
        _go_on_without("it is closed")


def _go_on_without(reason: str | None) -> None:
    _write(f"{NOTE}standard output can't be written ({reason}): the run goes on without it")


def say(text: str) -> None:
    """Writes a line to descriptor 2, after what was printed before. Never raises."""
    flush()
    _write(text)


def _write(text: str) -> None:
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    with suppress(OSError):
        os.write(ERRORS, f"{printable(text)}\n".encode(encoding, "backslashreplace"))


def flush() -> None:
    """Writes what sys.stdout and sys.stderr still hold, but waits only FLUSH_S for a reader. Never raises."""
    thread = threading.Thread(target=_flush, daemon=True)
    with suppress(RuntimeError):  # no further thread may start
        thread.start()
        thread.join(FLUSH_S)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # None, closed, or replaced by anything
            show_passing("")
            stream.flush()


def show_passing(text: str) -> None:
    """Shows a line on standard output that the next output replaces; empty: takes it away. Never raises."""
    with suppress(OSError, ValueError, UserError):
        if isinstance(sys.stdout, Stream):
            sys.stdout.show_passing(text)


def silent_s() -> float:
    """Returns the seconds for which standard output has not been written to, except for the passing line."""
    return time.monotonic() - sys.stdout.wrote_s if isinstance(sys.stdout, Stream) else 0.0


def width() -> int:
    """Returns how many columns a line may have: COLUMNS, else those of the terminal, else 80."""
    return shutil.get_terminal_size().columns


def table_width(stream: TextIO | None = None) -> int | None:
    """Returns how many columns a table may have on a stream (default: standard output); None: any number, because it is
    a file or a pipe. Messages are not wrapped: they hold commands and paths, which stay whole where the terminal breaks
    their lines."""
    stream = sys.stdout if stream is None else stream
    return width() if stream is not None and stream.isatty() else None


def print_json(values: Mapping[str, Any], asked: bool | None = None) -> None:
    """Prints values for machines as a line of JSON. asked: --json or --no-json; None: neither, so a terminal gets
    none."""
    if table_width() is None if asked is None else asked:
        print(json.dumps(values), flush=True)
