"""What a process says while nothing else is printed: on one line that is replaced, or on lines in a shared terminal.
Three programs at the end of a pseudo-terminal; 4 s."""

import sys

import pytest

from rlhf_spmd.runtime.guard import progress
from tests.run_mpi import mpi_command
from tests.unit.runtime.guard.test_terminal import on_terminal

WORKS = """
import os, sys, time
from rlhf_spmd.runtime.guard import launcher, progress, streams
streams.prepare(is_work=False)
progress.TICK_S, progress.SILENT_S = 0.05, 0.3
count = 0
def text():
    global count
    count += 1
    if count == 1:
        raise RuntimeError("half made")
    return f"part {count} of\\n " + "x" * 200
if launcher.launched(os.environ).rank == 0:
    progress.start("starting")
    progress.say(text)
    time.sleep(1.0)
    print("a row")
    with progress.during("a search"):
        pass
    progress.stop()
    time.sleep(0.2)
    print("the end")
"""
ERASE = "\r\x1b[K"


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> list[str]:
    path = tmp_path_factory.mktemp("program") / "works.py"
    path.write_text(WORKS, encoding="utf-8")
    return [sys.executable, str(path)]


def test_one_process_replaces_a_line(program):
    said = on_terminal(program, 60, TERM="xterm")
    assert "starting" not in said or said.startswith(ERASE)  # a quick start shows nothing
    shown, _, end = said.partition("a row\n")
    lines = [line for line in shown.split(ERASE) if line]
    assert len(lines) > 3 and {len(line) for line in lines} <= {59}, lines
    assert all(line.startswith("part ") and line.endswith("...") for line in lines), lines
    assert shown.endswith(ERASE) and end.endswith("the end\n") and "\n" not in shown


def test_ranks_print_lines_and_move_no_cursor(program):
    said = on_terminal([*mpi_command(2), *program], 60, TERM="xterm")
    first, *lines = said.split("\n")[:-1]
    assert first == "starting" and "\x1b" not in said and "\r" not in said
    assert lines[-2:] == ["a row", "the end"] and 1 <= len(lines[:-2]) <= 4
    assert all(len(line) <= 60 for line in lines)


def test_a_file_gets_rows_alone(program):
    said = on_terminal(["sh", "-c", f"{' '.join(program)} | cat"], 60)
    assert said == "a row\nthe end\n"


def test_durations_have_six_places():
    found = [progress.duration(seconds) for seconds in (0, 99, 100, 5940, 6000, 172800, 8e7, 1e12)]
    assert found == ["0 s", "99 s", "2 min", "99 min", "1.7 h", "2 d", "926 d", "years"]
