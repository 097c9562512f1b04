"""Names of options in other programs (other_names.toml), for `coming-from`, suggestions and the documents."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any, Literal

PROGRAMS = {"trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF"}
GENERAL = (
    "path",
    "name",
    "enable",
    "len",
    "type",
    "log",
    "strategy",
    "mode",
)  # in verl they mean what their group says
Kind = Literal["option", "part", "no_effect", "unavailable"]
KINDS: tuple[Kind, ...] = ("option", "part", "no_effect", "unavailable")


@dataclass(frozen=True, slots=True)
class Name:
    """Options of other programs that mean the same.

    ours: the options of this program; `*.NAME` is one of the algorithm, `--NAME` an argument of the command line.
    theirs: program -> names or patterns.
    also: names in further programs.
    values: texts there -> texts here.
    rule: function of migration/rules.py that translates a value.
    why: for names that have no option here.
    """

    kind: Kind
    ours: tuple[str, ...]
    theirs: Mapping[str, tuple[str, ...]]
    also: tuple[str, ...]
    values: Mapping[str, str]
    rule: str
    why: str


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("other_names.toml").read_text(encoding="utf-8"))


@cache
def names() -> tuple[Name, ...]:
    """Returns the table, in the order of its file."""
    return tuple(_name(kind, row) for kind in KINDS for row in _table()[kind])


def _name(kind: Kind, row: Mapping[str, Any]) -> Name:
    theirs = {program: tuple(row.get(program, "").split()) for program in PROGRAMS}
    ours, also = tuple(row.get("ours", "").split()), tuple(row.get("also", "").split())
    return Name(kind, ours, theirs, also, row.get("values", {}), row.get("rule", ""), row.get("why", ""))


def defaults(program: str, algorithm: str) -> list[Mapping[str, Any]]:
    """Returns the rows of another program's defaults that change what an algorithm learns (other_names.toml)."""
    return [row for row in _table()["defaults"][program] if algorithm in row.get("of", algorithm).split()]


def find(program: str, key: str) -> Name | None:
    """Returns the entry of an option of another program; names count before patterns."""
    known = [(pattern, name) for name in names() for pattern in name.theirs[program]]
    exact = (name for pattern, name in known if pattern == key)
    return next(exact, None) or next((name for pattern, name in known if fnmatchcase(key, pattern)), None)


@cache
def elsewhere() -> dict[str, list[Name]]:
    """Returns name of an option there, whole and without its groups -> its entries, for suggestions; patterns are left
    out."""
    found: dict[str, list[Name]] = {}
    for name in names():
        every = [one for theirs in name.theirs.values() for one in theirs] + [*name.also]
        leaves = dict.fromkeys(every) | {one.rpartition(".")[2]: None for one in every}
        for leaf in (leaf for leaf in leaves if "*" not in leaf and leaf not in GENERAL):
            found.setdefault(leaf, []).append(name)
    return found
