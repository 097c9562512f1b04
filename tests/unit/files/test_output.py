"""Standard streams that are closed, full or left by their reader: only what they would have shown is lost. What shows
on a terminal, at the end of a pseudo-terminal. 3 s."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from tests.run_mpi import environment_alone

NOTE = "rlhf_spmd: note: standard output can't be written ({}): the run goes on without it\n"
PREPARED = "import os, sys\nfrom rlhf_spmd.files import output\noutput.prepare(is_work={})\n"
TALKS = "print('é')\nsys.stdout.flush()\nprint('é', flush=True)\noutput.flush()\noutput.say('end')\n"


def run(redirected: str, body: str = TALKS, *, is_work: bool = False, **environment: str) -> tuple[int, bytes, str]:
    """Returns status, standard output and standard error of a program whose streams a shell has prepared."""
    program = PREPARED.format(is_work) + body
    done = subprocess.run(
        ["bash", "-c", f'exec "$0" -c "$1" {redirected}', sys.executable, program],
        capture_output=True,
        timeout=60,
        env=environment_alone(PYTHONUNBUFFERED="", **environment),
    )
    return done.returncode, done.stdout, done.stderr.decode()


@pytest.mark.parametrize(
    ("redirected", "reason"),
    [
        (">&-", "it is closed"),
        ("> /dev/full", "No space left on device"),
        ("1< /dev/null", "Bad file descriptor"),
    ],
)
def test_a_run_goes_on_without_a_console(redirected, reason):
    assert run(redirected) == (0, b"", NOTE.format(reason) + "end\n")


def test_a_run_goes_on_without_a_reader():
    leaves = "read, write = os.pipe()\nos.dup2(write, 1)\nos.close(read)\n"
    assert run("", leaves + TALKS) == (0, b"", NOTE.format("Broken pipe") + "end\n")


def test_output_that_is_the_work_ends_it():
    body = "from rlhf_spmd.errors import UserError\ntry: {}except UserError as error: output.say(str(error))"
    status, _, err = run("> /dev/full", body.format("print('é', flush=True)\n"), is_work=True)
    text = "standard output can't be written (No space left on device): print to another file or disk\n"
    assert (status, err) == (0, text)


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path):
    body = f"file = open({str(tmp_path / 'data')!r}, 'w')\n{TALKS}print('e', file=sys.stderr)\n"
    assert run("<&- >&- 2>&-", f"{body}print(file.fileno() > 2, file=file)")[0] == 0
    assert (tmp_path / "data").read_bytes() == b"True\n"


def test_what_an_encoding_lacks_is_escaped():
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    body = "print('\\xe9 \\u2603 \\ud83d \\x1b')\nprint('\\xe9', file=sys.stderr)\noutput.say('\\u2603')"
    assert run("", body, **ascii_only) == (0, b"\\xe9 \\u2603 \\ud83d \\x1b\n", "\\xe9\n\\u2603\n")


# The terminal


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
