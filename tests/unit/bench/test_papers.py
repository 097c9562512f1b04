"""docs/papers.md: every command exists with its options, and what is quoted of rows can be found in them."""

import importlib
import re
import shlex

import pytest

from bench.__main__ import MODULES, SHARED
from bench.rows import RESULTS, Arguments
from bench.tables import QUOTES, quote
from rlhf_spmd.command_line.arguments import parse
from tools.__main__ import MODULES as TOOLS

CLAIMS = [entry for name, entries in QUOTES.items() if name != "evidence" for entry in entries]
KINDS = {"forecast", "fitted; forecast", "measured, CPU", "tested"}


class Understood(Exception):
    """A bench has read its arguments."""


def understood(command: str, monkeypatch) -> None:
    """Reads a command as the program would, and runs nothing. Raises or exits if there is no such bench or option."""
    words = shlex.split(command)
    package, *arguments = words[words.index("-m") + 1 :]
    if package == "rlhf_spmd":
        parse(arguments)
    elif package == "tools":
        assert arguments[0] in TOOLS
    else:
        name, *options = arguments

        def read(self, given):
            super(Arguments, self).parse_args(given)
            raise Understood

        monkeypatch.setattr(Arguments, "parse_args", read)
        with pytest.raises(Understood):
            importlib.import_module(MODULES[name]).main(arguments if name in SHARED else options)


@pytest.mark.parametrize("command", dict.fromkeys(entry["command"] for entry in CLAIMS))
def test_commands_are_understood(command, monkeypatch):
    understood(command, monkeypatch)


def test_every_claim_says_what_comes_out():
    assert len(CLAIMS) > 50 and {entry["kind"] for entry in CLAIMS} <= KINDS
    for entry in CLAIMS:
        assert {"claim", "source", "command", "ours", "kind", "verdict"} <= entry.keys(), entry
        texts = quote(entry)
        assert not re.search(r"(^| )-( |,|;|$)|nan|\{", texts["ours"]), texts  # a dash: no such value
        assert ("file" in entry) == (RESULTS / f"{entry.get('file')}.jsonl").exists()
