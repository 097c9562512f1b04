"""Says what this process does while nothing else is printed: at the start, in a long iteration, in a long search.

In a terminal that no other process writes to, one line is replaced twice a second. Else, as under mpirun, a line is
printed where nothing has been for a while. A thread does this, so that work needs no calls: it asks for the text when
it shows one. No torch, no MPI.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rlhf_spmd.runtime.guard import streams, terminal

TICK_S = 0.5
SILENT_S = 10.0  # the fewest seconds between lines in a terminal that ranks share
SILENT_LOG_S = 60.0  # the same in a file, which keeps them

_over = threading.Event()
_over.set()
_text: Callable[[], str] = str


def start(text: str, *, only_in_place: bool = False) -> None:
    """Shows what this process does, from now on until `stop`.

    text: see `say`; in a shared terminal it is printed at once.
    only_in_place: does nothing unless the line can be replaced.
    """
    global _over
    found = terminal.terminal()
    if only_in_place and not (found and found.moves):
        return
    say(text)
    if found is not None and not found.moves:
        streams.put(text, sys.stdout)
    _over = threading.Event()
    with suppress(RuntimeError):  # no further thread may start
        threading.Thread(target=_run, args=(_over, found), name="progress", daemon=True).start()


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


def end() -> None:
    """Stops saying what this process does; what is printed next takes the last line away. Never waits."""
    _over.set()


def stop() -> None:
    """Stops saying what this process does, and takes its last line away."""
    end()
    streams.show_passing("")


def duration(seconds: float) -> str:
    """Formats seconds for people in six places: `45 s`, `12 min`, `3.4 h`, `5 d`, `years`."""
    for size, unit, digits, most in ((1, "s", 0, 99.5), (60, "min", 0, 99.5), (3600, "h", 1, 48)):
        if seconds < most * size:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds / 86400:.0f} d" if seconds < 1000 * 86400 else "years"


def _run(over: threading.Event, found: terminal.Terminal | None) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread
    silent_s = SILENT_S if found else SILENT_LOG_S
    while not over.wait(TICK_S):
        if found and found.moves:
            if streams.silent_s() >= TICK_S:
                streams.show_passing(_shown(found.columns - 1))
        elif streams.silent_s() >= silent_s:
            streams.put(_shown(terminal.width()), sys.stdout)
    streams.show_passing("")


def _shown(columns: int) -> str:
    """Returns the text on one line."""
    text = ""
    with suppress(Exception):  # what it reads may be half made
        text = " ".join(_text().split())
    return text if len(text) <= columns else text[: columns - 3] + "..."
