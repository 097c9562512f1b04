"""Suggestions for unknown option names: names in other systems, parts of names, typing errors."""

import difflib
from collections.abc import Iterable, Sequence

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.other_names import elsewhere

GROUPS = ("data", "generation", "optimizer", "checkpoint", "eval", "rollouts", "logging", "strategy")  # of every run
DASHED = ("model", "config", "resume", "layout", "cluster", "calibration", "runs", "name")  # --model and so on


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns a suggestion of the closest name, with its prefix, for the end of a message; empty if none is close."""
    return _suggestion([prefix + close for close in difflib.get_close_matches(name, list(known), n=1)])


def check_known(kind: str, name: str, known: Iterable[str], more: str = "") -> None:
    """Raises UserError for a name that is not known.

    kind: what it should name.
    more: what else may be given.
    """
    names = list(known)
    if name not in names:
        raise UserError(
            f"unknown {kind} {name!r}{did_you_mean(name, names)}; known: {', '.join(names) or 'none'}{more}"
        )


def suggest_option(name: str, group: Sequence[str], every: Sequence[str]) -> str:
    """Returns a suggestion for an unknown option, for the end of a message. group: options with the same prefix; every:
    all options, and in a file the names of options with dashes."""
    leaf = name.rpartition(".")[2].lower()
    keys: dict[str, list[str]] = {}
    for key in every:
        keys.setdefault(key.rpartition(".")[2], []).append(key)
    there = elsewhere().get(name) or elsewhere().get(leaf, [])
    ours = [key for entry in there for name_here in entry.ours for key in _keys_here(name_here, every)]
    if name in DASHED or leaf in keys or ours:
        names = [f"--{name}"] if name in DASHED else keys.get(leaf) or list(dict.fromkeys(ours))
        return _suggestion([plain if (plain := name.removeprefix("--")) in every else name for name in names])
    if there:
        return f" ({there[0].why})" if there[0].why and there[0].kind != "option" else ""
    of_leaf = [keys[close][0] for close in difflib.get_close_matches(leaf, keys, n=1)]
    if of_leaf and "." not in name:
        return _suggestion(of_leaf)
    return did_you_mean(name, group) or did_you_mean(name, every) or _suggestion(of_leaf)


def _keys_here(name: str, every: Sequence[str]) -> list[str]:
    """Returns the options of this run that a name of ours stands for; in it, `*` stands for any algorithm."""
    group, _, leaf = name.rpartition(".")
    if group == "*":
        return [key for key in every if key.endswith(f".{leaf}") and key.partition(".")[0] not in GROUPS]
    # the options of a strategy are not keys of a configuration; they are there if `strategy` is
    return [name] if name in every or group in every or name.startswith("--") else []


def _suggestion(names: Sequence[str]) -> str:
    return f" (did you mean {' or '.join(map(repr, names))}?)" if names else ""
