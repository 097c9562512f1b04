"""docs/papers.md: every command exists with its options, and what is quoted of rows can be found in them."""

import importlib
import re
import shlex

import pytest

from bench.__main__ import MODULES, SHARED
from bench.cells import cell, grouped
from bench.rows import RESULTS, Arguments
from bench.tables import QUOTES, quote
from rlhf_spmd.command_line.arguments import parse
from rlhf_spmd.errors import UserError
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


@pytest.mark.parametrize(
    "command",
    [
        "python -m bench scan --suite four-71b",
        "python -m bench scan --sweet four-70b",
        "python -m bench scam",
        "python -m rlhf_spmd plan --metod two_phase",
    ],
)
def test_a_command_that_does_not_exist_is_found(command, monkeypatch):
    with pytest.raises((SystemExit, KeyError, UserError)):
        understood(command, monkeypatch)


def test_every_claim_says_what_comes_out():
    assert len(CLAIMS) > 50 and {entry["kind"] for entry in CLAIMS} <= KINDS
    for entry in CLAIMS:
        assert {"claim", "source", "command", "ours", "kind", "verdict"} <= entry.keys(), entry
        texts = quote(entry)
        assert not re.search(r"(^| )-( |,|;|$)|nan|\{", texts["ours"]), texts  # a dash: no such value
        assert ("file" in entry) == (RESULTS / f"{entry.get('file')}.jsonl").exists()


def test_numbers_of_groups():
    rows = [
        {"place": "a", "strategy": "old", "s": 3.0, "error": -0.5, "ok": True},
        {"place": "a", "strategy": "new", "s": 2.0, "error": 0.1, "ok": False},
        {"place": "b", "strategy": "old", "s": 8.0, "error": 0.2, "ok": True},
        {"place": "b", "strategy": "new", "s": None, "error": None, "ok": False},
    ]
    groups = {"": grouped(rows, ("place",))}
    assert cell("{max old[s] / new[s]:.2f}; {all gain old[s] / new[s]:+.0%}", groups) == "1.50; +50%"
    assert cell("{max abs error}; {count ok} of {count}; {mean old[s]:.1f}", {"": rows}) == "0.5; 2 of 4; -"
    assert cell("{new[s]:.1f} {old[s] + new[s]:.1f} {place}", groups[""][1]) == "- - b"
