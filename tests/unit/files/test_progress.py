"""What a process shows while nothing else is printed: on one line that is replaced, or on lines of its own. Programs at
the end of a pseudo-terminal; 3 s."""

import sys

import pytest

from tests.unit.files.test_output import on_terminal

WORKS = """
import sys, time
from rlhf_spmd.files import output, progress
output.prepare(is_work=False)
progress.TICK_S, progress.SILENT_S = 0.05, 0.3
count = 0
def text():
    global count
    count += 1
    if count == 1:
        raise RuntimeError("half made")
    return f"part {count} of\\n " + "x" * 200
progress.start("starting", is_alone="alone" in sys.argv, is_run="run" in sys.argv)
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
    said = on_terminal([*program, "alone", "run"], 60, TERM="xterm")
    assert "starting" not in said or said.startswith(ERASE)  # a quick start shows nothing
    shown, _, end = said.partition("a row\n")
    lines = [line for line in shown.split(ERASE) if line]
    assert len(lines) > 3 and {len(line) for line in lines} <= {59}, lines
    assert all(line.startswith("part ") and line.endswith("...") for line in lines), lines
    assert shown.endswith(ERASE) and end.endswith("the end\n") and "\n" not in shown
