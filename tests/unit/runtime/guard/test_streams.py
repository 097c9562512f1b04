"""Standard streams that are closed, full or left by their reader: only what they would have shown is lost. 2 s."""

import io
import os
import subprocess
import sys
import time

import pytest

from rlhf_spmd.runtime.guard import streams
from rlhf_spmd.runtime.records.console import Console
from tests.run_mpi import environment_alone

NOTE = "rlhf_spmd: note: standard output can't be written ({}): the run goes on without it\n"
PREPARED = "import os, sys\nfrom rlhf_spmd.runtime.guard import streams\nstreams.prepare(is_work={})\n"
TALKS = "print('é')\nsys.stdout.flush()\nprint('é', flush=True)\nstreams.flush()\nstreams.say('end')\n"


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
        ("<&- >&-", "it is closed"),
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
    body = "from rlhf_spmd.errors import UserError\ntry: {}except UserError as error: streams.say(str(error))"
    status, _, err = run("> /dev/full", body.format("print('é', flush=True)\n"), is_work=True)
    assert (status, err) == (
        0,
        "standard output can't be written (No space left on device): print to another file or disk\n",
    )


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path):
    body = f"file = open({str(tmp_path / 'data')!r}, 'w')\n{TALKS}print('e', file=sys.stderr)\n"
    assert run("<&- >&- 2>&-", f"{body}print(file.fileno() > 2, file=file)")[0] == 0
    assert (tmp_path / "data").read_bytes() == b"True\n"


def test_a_function_that_closes_or_replaces_the_streams_does_not_end_the_run():
    closed = "sys.stdout.close()\nsys.stderr.close()\nprint('still here')\n"
    assert run("", closed + TALKS, PYTHONUTF8="1")[1:] == ("still here\né\né\n".encode(), "end\n")
    for body in (
        "sys.stdout = sys.stderr = None\n",
        "sys.stdout = sys.stderr = open(os.devnull)\nsys.stdout.close()\n",
    ):
        assert run("", f"{body}streams.flush()\nstreams.say('end')") == (0, b"", "end\n")


def test_what_an_encoding_lacks_is_escaped():
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    body = "print('\\xe9 \\u2603 \\ud83d')\nprint('\\xe9', file=sys.stderr)\nstreams.say('\\u2603')"
    assert run("", body, **ascii_only) == (0, b"\\xe9 \\u2603 \\ud83d\n", "\\xe9\n\\u2603\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_that_does_not_block_gets_everything(unbuffered):
    read, write = os.pipe()
    os.set_blocking(write, False)
    program = PREPARED.format(True) + "print('x' * 1_000_000)"
    environment = environment_alone(PYTHONUNBUFFERED=unbuffered)
    with subprocess.Popen([sys.executable, "-c", program], stdout=write, env=environment):
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            assert len(pipe.read()) == 1_000_001


def test_a_message_does_not_wait_for_a_reader_that_has_stopped(monkeypatch, capfd):
    read, write = os.pipe()
    stuck = os.fdopen(write, "w", encoding="utf-8")
    os.set_blocking(write, False)
    with pytest.raises(BlockingIOError):
        os.write(write, bytes(2**20)) and os.write(write, bytes(2**20))
    os.set_blocking(write, True)
    stuck.write("more")
    monkeypatch.setattr(sys, "stdout", stuck)
    monkeypatch.setattr(streams, "WRITE_S", 0.1)
    began = time.monotonic()
    streams.say("what failed")
    assert time.monotonic() - began < 60 and capfd.readouterr().err == "what failed\n"
    os.close(read)  # ends the thread that waits


def test_a_console_whose_stream_was_closed_is_silent(capfd):
    stream = io.StringIO()
    console = Console({}, stream=stream)
    console.note("heard")
    stream.close()
    console.note("not heard")
    console.note("nor this")
    assert capfd.readouterr().err == NOTE.format("I/O operation on closed file")
    for stream in (io.StringIO(), None):
        Console({}, enabled=False, stream=stream).note("of another rank")
