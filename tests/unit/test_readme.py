"""The README is true: its tables are those of the committed rows, its files exist, its commands are understood."""

import re
import shlex
from pathlib import Path

import pytest

from bench.tables import BLOCK, render
from rlhf_spmd.__main__ import _parse

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
]


def test_tables_come_from_rows():
    assert BLOCK.search(TEXT)
    assert render(TEXT) == TEXT, "run `python -m bench tables`"


def test_linked_files_exist():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if "://" not in link]
    assert links and all((ROOT / link).exists() for link in links), links


def test_named_files_exist():
    names = [
        name for name in re.findall(r"`([a-z_/.]+/[\w/.]*)`", TEXT) if not name.startswith(("runs/", "path/", "actor/"))
    ]
    assert len(names) > 5
    for name in names:
        assert (ROOT / name).exists() or (ROOT / "rlhf_spmd" / name).exists(), name


@pytest.mark.parametrize(
    "command", [line for line in COMMANDS if "rlhf_spmd " in line and line.startswith(("mpirun", "python"))]
)
def test_commands_are_understood(command):
    words = shlex.split(command)
    parsed = _parse(words[words.index("rlhf_spmd") + 1 :])
    assert parsed.verb in ("train", "generate", "profile", "check", "plan", "convert")


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z][a-z0-9-]+)", TEXT):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
