"""The terminal behind standard output: found here and behind a launcher, with its width; and when JSON is printed. Each
program runs at the end of a pseudo-terminal; 3 s."""

import fcntl
import os
import pty
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from rlhf_spmd.runtime.guard import terminal
from tests.run_mpi import environment_alone, mpi_command

SHOWS = """
import os, sys
from rlhf_spmd.runtime.guard import launcher, streams, terminal
streams.prepare(is_work=False)
if launcher.launched(os.environ).rank == 0:
    print("found", terminal.terminal(), terminal.width())
    terminal.print_json({"ok": True}, {"--json": True, "--no-json": False}.get(sys.argv[-1]))
"""


def on_terminal(command: list[str], columns: int = 0, **environment: str) -> str:
    """Returns what a program prints whose standard streams are a terminal with so many columns (0: it does not
    tell)."""
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    own = {name: text for name, text in environment_alone().items() if name not in ("COLUMNS", "TERM")} | environment
    process = subprocess.Popen(command, stdin=there, stdout=there, stderr=there, start_new_session=True, env=own)
    os.close(there)
    said = b""
    try:
        while part := os.read(here, 65536):
            said += part
    except OSError:  # the last process has closed it
        pass
    os.close(here)
    assert process.wait(120) == 0, said
    return said.decode().replace("\r\n", "\n")


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> list[str]:
    path = tmp_path_factory.mktemp("program") / "shows.py"
    path.write_text(SHOWS, encoding="utf-8")
    return [sys.executable, str(path)]


def test_one_process(program):
    assert on_terminal(program, 100, TERM="xterm") == "found Terminal(columns=100, moves=True) 100\n"
    assert on_terminal(program, 100, TERM="dumb", COLUMNS="60") == "found Terminal(columns=60, moves=False) 60\n"
    assert on_terminal(program, 0, TERM="xterm", COLUMNS="no") == "found Terminal(columns=80, moves=True) 80\n"
    assert on_terminal([*program, "--json"], 100).endswith('{"ok": true}\n')
    piped = ["sh", "-c", f"{shlex.join(program)} | cat; {shlex.join(program)} --no-json | cat"]
    assert on_terminal(piped, 100) == 'found None 80\n{"ok": true}\nfound None 80\n'


def test_ranks_show_on_the_terminal_of_their_launcher(program):
    """MPICH gives ranks a pipe, which its launcher copies to its own output."""
    command = [*mpi_command(2), *program]
    assert on_terminal(command, 100) == "found Terminal(columns=100, moves=False) 100\n"
    piped = ["sh", "-c", f"{shlex.join(command)} | cat"]
    assert on_terminal(piped, 100, COLUMNS="90") == 'found None 90\n{"ok": true}\n'


def test_a_launcher_that_cannot_be_found(monkeypatch):
    """As under srun, or where the launcher is on another machine."""
    monkeypatch.setattr(terminal, "LAUNCHERS", (b"no such",))
    assert terminal._output_of_launcher() is None
    assert terminal._columns_of("/dev/null") is None and terminal._columns_of("/no/such") is None


def test_verbs_print_json_by_one_rule():
    """Nothing else in the package prints values for machines."""
    root = Path(terminal.__file__).parents[2]
    printing = [path for path in root.rglob("*.py") if "print(json.dumps(" in path.read_text(encoding="utf-8")]
    assert printing == [Path(terminal.__file__)]
