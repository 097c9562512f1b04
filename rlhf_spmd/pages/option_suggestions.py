"""Suggestions for unknown option names: names in other systems, parts of names, typing errors."""

import difflib
from collections.abc import Iterable, Sequence

from rlhf_spmd.pages.other_names import elsewhere

GROUPS = ("data", "generation", "optimizer", "checkpoint", "eval", "rollouts", "logging", "strategy")  # of every run
DASHED = ("model", "config", "resume", "layout", "cluster", "calibration", "runs", "name")  # --model and so on


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns a suggestion of the closest name, with its prefix, for the end of a message; empty if none is close."""
    return _suggestion([prefix + one for one in difflib.get_close_matches(name, list(known), n=1)])


def suggest_option(name: str, group: Sequence[str], every: Sequence[str]) -> str:
    """Returns a suggestion for an unknown option, for the end of a message. group: options with the same prefix; every:
    all options, and in a file the names of options with dashes."""
    if name in DASHED:
        return _suggestion([f"--{name}"], every)
    leaf = name.rpartition(".")[2].lower()
    same_leaf = [key for key in every if key.rpartition(".")[2] == leaf]
    with_word = [key for key in every if f"_{leaf}_" in f"_{key.rpartition('.')[2]}_"]
    with_word = [key for key in with_word if key in group] or with_word
    there = elsewhere().get(name) or elsewhere().get(leaf, [])
    ours = [one for entry in there for one in _here(entry.ours, every)]
    names = same_leaf or list(dict.fromkeys(ours)) or (with_word if len(with_word) <= 3 else ())
    if names:
        return _suggestion(names, every)
    if there:
        why = there[0].why if there[0].kind != "option" else ""  # that of an option is against some of its values
        return f" ({why})" if why else ""
    by_leaf = {key.rpartition(".")[2]: key for key in reversed(every)}
    of_leaf = [by_leaf[one] for one in difflib.get_close_matches(leaf, list(by_leaf), n=1)]
    if of_leaf and "." not in name:
        return _suggestion(of_leaf)
    close = difflib.get_close_matches(name, list(group), n=1) or difflib.get_close_matches(name, list(every), n=1)
    return _suggestion(close or of_leaf)


def _here(names: Sequence[str], every: Sequence[str]) -> list[str]:
    """Returns those of the names that this run has; `*` stands for any algorithm."""
    found = []
    for name in names:
        group, _, leaf = name.rpartition(".")
        # the options of a strategy are not keys of a configuration; they are there if `strategy` is
        if name in every or name.startswith("--") or (group in every and group):
            found.append(name)
        elif group == "*":
            found += [key for key in every if key.rpartition(".")[2] == leaf and key.partition(".")[0] not in GROUPS]
    return found


def _suggestion(names: Sequence[str], every: Sequence[str] = ()) -> str:
    names = [plain if (plain := name.removeprefix("--")) in every else name for name in names]
    return f" (did you mean {' or '.join(repr(name) for name in names)}?)" if names else ""
