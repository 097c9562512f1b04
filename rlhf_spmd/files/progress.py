"""Shows what this process does while nothing else is printed: at the start, in a long iteration, in a long search.

In a terminal that no other process writes to, one line is replaced twice a second. Elsewhere, as under mpirun, a run
prints a line where nothing has been for a minute. A thread does this, so that work needs no calls: it asks for the text
when it shows one.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rlhf_spmd.files import output

TICK_S = 0.5
SILENT_S = 60.0  # the fewest seconds between lines

_over = threading.Event()
_over.set()
_text: Callable[[], str] = str


def start(text: str, *, is_alone: bool, is_run: bool) -> None:
    """Shows what this process does, from now on until `stop`.

    text: see `say`.
    is_alone: no other process writes to its terminal.
    is_run: it prints lines where none can be replaced.
    """
    global _over
    say(text)
    in_place = is_alone and output.table_width() is not None and os.environ.get("TERM") != "dumb"
    if in_place or is_run:
        _over = threading.Event()
        with suppress(RuntimeError):  # no further thread may start
            threading.Thread(target=_run, args=(_over, in_place), name="progress", daemon=True).start()


def say(text: str | Callable[[], str]) -> None:
    """Sets what this process does from now on; a function is called, from another thread, whenever it is to be
    shown."""
    global _text
    began_s = time.monotonic()
    _text = text if callable(text) else lambda: f"{text}, {time.monotonic() - began_s:.0f} s"


@contextmanager
def during(text: str) -> Iterator[None]:
    """Sets what this process does in a block, and afterwards what it did before."""
    global _text
    before = _text
    say(text)
    try:
        yield
    finally:
        _text = before


def stop() -> None:
    """Stops showing what this process does, and takes its last line away."""
    _over.set()
    output.show_passing("")


def duration(seconds: float) -> str:
    """Formats seconds for people in six places: `45 s`, `12 min`, `3.4 h`, `5 d`, `years`."""
    for size, unit, digits, most in ((1, "s", 0, 99.5), (60, "min", 0, 99.5), (3600, "h", 1, 48)):
        if seconds < most * size:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds / 86400:.0f} d" if seconds < 1000 * 86400 else "years"


def _run(over: threading.Event, in_place: bool) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread
    while not over.wait(TICK_S):
        text = ""
        with suppress(Exception):  # what it reads may be half made
            text = " ".join(_text().split())
        columns = output.width() - 1
        text = text if len(text) <= columns else text[: columns - 3] + "..."
        if in_place and output.silent_s() >= TICK_S:
            output.show_passing(text)
        elif not in_place and output.silent_s() >= SILENT_S:
            print(text, flush=True)
    output.show_passing("")
