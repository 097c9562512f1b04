"""Names of options in other programs (other_names.toml), for `coming-from`, suggestions and the documents."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
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
LISTS = ("ours", "also", "of")  # fields with several words


@dataclass(frozen=True, slots=True)
class Name:
    """Options of other programs that mean the same; the top of other_names.toml says what the fields are.

    theirs: program -> names or patterns.
    """

    kind: Kind
    theirs: Mapping[str, tuple[str, ...]]
    ours: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    id: str = ""
    of: tuple[str, ...] = ()
    when: Mapping[str, str] = field(default_factory=dict)
    type: str = "text"
    values: Mapping[str, str] = field(default_factory=dict)
    above: float = 0.0
    off: str = ""
    scale: str = ""
    share: str = ""
    first: bool = False
    sets: Mapping[str, str] = field(default_factory=dict)
    rule: str = ""
    later: str = ""
    why: str = ""

    @property
    def concept(self) -> str:
        """What other entries and the functions call it."""
        return self.id or next(iter(self.ours), "")


@cache
def table() -> Mapping[str, Any]:
    """Returns what other_names.toml holds."""
    return tomllib.loads(resources.files(__package__).joinpath("other_names.toml").read_text(encoding="utf-8"))


@cache
def names() -> tuple[Name, ...]:
    """Returns the names, in the order of their file."""
    return tuple(_name(kind, row) for kind in KINDS for row in table()[kind])


def _name(kind: Kind, row: Mapping[str, Any]) -> Name:
    theirs = {program: tuple(row.get(program, "").split()) for program in PROGRAMS}
    settings: dict[str, Any] = {key: tuple(value.split()) if key in LISTS else value for key, value in row.items()}
    return Name(kind, theirs, **{key: value for key, value in settings.items() if key not in PROGRAMS})


def defaults(program: str, algorithm: str) -> list[Mapping[str, Any]]:
    """Returns the rows of another program's defaults that change what an algorithm learns (other_names.toml)."""
    return [row for row in table()["defaults"][program] if algorithm in row.get("of", algorithm).split()]


@cache
def find(program: str, key: str) -> tuple[Name, ...]:
    """Returns the entries of an option of another program; those that name it count before patterns."""
    exact = tuple(name for name in names() if key in name.theirs[program])
    return exact or tuple(
        name for name in names() if any(fnmatchcase(key, pattern) for pattern in name.theirs[program])
    )


@cache
def elsewhere() -> dict[str, list[Name]]:
    """Returns name of an option there, whole and without its groups -> its entries, for suggestions; patterns are left
    out."""
    entries: dict[str, list[Name]] = {}
    for name in names():
        keys = [*sum(name.theirs.values(), ()), *name.also]
        for key in dict.fromkeys([*keys, *(key.rpartition(".")[2] for key in keys)]):
            if "*" not in key and key not in GENERAL:
                entries.setdefault(key, []).append(name)
    return entries
