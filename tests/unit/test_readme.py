"""The README is true: its tables are those of the committed rows, its files exist, its commands are understood."""

import re
import shlex
from pathlib import Path

import pytest

from bench.tables import BLOCK, PAGES, render
from rlhf_spmd.__main__ import _parse

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition("#")[0].strip()
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
    if not language
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_come_from_rows(page):
    text = page.read_text()
    assert BLOCK.search(text)
    assert render(text) == text, "run `python -m bench tables`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in link]
    assert links
    for link in links:
        path, _, section = link.partition("#")
        assert (page.parent / path).exists(), link
        if section:
            titles = re.findall(r"^#+ (.*)$", (page.parent / path).read_text(), re.MULTILINE)
            assert section in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], link


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
    assert parsed.verb in ("train", "generate", "profile", "check", "plan", "convert", "status", "postmortem")


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z][a-z0-9-]+)", TEXT):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
