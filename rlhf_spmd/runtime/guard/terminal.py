"""The terminal that standard output shows on, and what depends on it: how wide lines are, whether the cursor may move,
and whether the line of JSON is printed.

Under mpirun a rank writes to a pipe (MPICH) or to a terminal that the launcher has made (Open MPI), and the launcher
copies it. So there the launcher's own output decides. Where it cannot be told, there is no terminal. No torch, no MPI.
"""

import json
import os
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rlhf_spmd.runtime.guard import launcher, streams

COLUMNS = 80  # of a terminal that does not tell, and of a file
NARROWEST = 20  # a smaller COLUMNS is a mistake
LAUNCHERS = (b"mpirun", b"mpiexec", b"prterun", b"orterun")  # how the names of their processes begin


class Terminal(NamedTuple):
    """What a stream shows on. moves: this process alone writes to it, so it may move the cursor."""

    columns: int
    moves: bool


def terminal(stream: TextIO | None = None) -> Terminal | None:
    """Returns the terminal of a stream (default: standard output); None if there is none, or if that can't be told."""
    stream = stream or sys.stdout
    here = streams.is_terminal(stream)
    path = _output_of_launcher() if launcher.is_launched(os.environ) and (here or _is_pipe(stream)) else None
    if path is not None:
        columns = _columns_of(path)
        return None if columns is None else Terminal(_columns(columns), moves=False)
    if not here:
        return None
    columns = 0
    with suppress(OSError, ValueError):
        columns = os.get_terminal_size(stream.fileno()).columns
    is_simple = launcher.is_launched(os.environ) or os.environ.get("TERM") == "dumb"
    return Terminal(_columns(columns), moves=not is_simple)


def width(stream: TextIO | None = None) -> int:
    """Returns how many columns a line may have: COLUMNS, else those of the terminal, else 80."""
    found = terminal(stream)
    return found.columns if found else _columns(0)


def table_width() -> int | None:
    """Returns how many columns a table may have on standard output; None: any number, because it is a file or a pipe.
    Messages are not wrapped: they hold commands and paths, which stay whole where the terminal breaks their lines."""
    found = terminal()
    return found.columns if found else None


def print_json(values: Mapping[str, Any], asked: bool | None = None) -> None:
    """Prints values for machines as a line of JSON, unless people look at a terminal. asked: --json or --no-json."""
    if wants_json(asked, terminal()):
        print(json.dumps(values), flush=True)


def wants_json(asked: bool | None, found: Terminal | None) -> bool:
    """Returns whether the line of JSON is printed. asked: --json or --no-json; None: neither, so a terminal gets
    none."""
    return found is None if asked is None else asked


def _columns(found: int) -> int:
    given = launcher.number_in(os.environ, "COLUMNS") or 0
    return next((number for number in (given, found) if number >= NARROWEST), COLUMNS)


def _is_pipe(stream: TextIO) -> bool:
    with suppress(OSError, ValueError):
        mode = os.fstat(stream.fileno()).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    return False


def _output_of_launcher() -> str | None:
    """Returns the standard output of the nearest launcher above this process; None: there is none on this machine."""
    process = os.getppid()
    with suppress(OSError, ValueError, IndexError):  # it has ended, or /proc is hidden
        while process > 1:
            text = Path(f"/proc/{process}/stat").read_bytes()
            name, _, rest = text.partition(b"(")[2].rpartition(b") ")
            if name.startswith(LAUNCHERS):
                return f"/proc/{process}/fd/{streams.OUTPUT}"
            process = int(rest.split()[1])
    return None


def _columns_of(path: str) -> int | None:
    """Returns the columns of the terminal that is this file (0: it does not tell); None if it is not a terminal."""
    with suppress(OSError):
        if not stat.S_ISCHR(os.stat(path).st_mode):  # the launcher's pipe must not be opened
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.get_terminal_size(descriptor).columns if os.isatty(descriptor) else None
        finally:
            os.close(descriptor)
    return None
