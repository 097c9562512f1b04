"""Compares two sets of goldens of `tools unchanged`: the first difference, after intended renames."""

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest

# Names of metrics, calls, kinds, keys and weights that were changed on purpose since the commit that is compared with:
# old -> new. They apply to whole words of the old side. Empty it when that commit has the new names itself.
RENAMES: dict[str, str] = {}
# Whole lines of listings, the same way.
REPHRASED: dict[str, str] = {
    "finding warning: streaming is off, because ppo.whiten=batch needs all advantages before the first step; use "
    "mini_batch": "finding warning: streaming is off, because estimate_advantages needs all rows of the iteration "
    "before the first step; choose options by which a mini-batch is enough",
}

WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
SHOWN = 160  # characters of a difference, of each side

Golden = Mapping[str, str] | Sequence[str]  # of a run: names and texts; of a program: lines


def renamed(text: str, renames: Mapping[str, str]) -> str:
    """Returns a text of the old side in the names of the new one."""
    return WORD.sub(lambda match: renames.get(match[0], match[0]), text) if renames else text


def in_new_names(golden: Golden, renames: Mapping[str, str]) -> Golden:
    """Returns a golden in the names of the new side; of a run only its names, not the values. Raises ValueError where
    two become one."""
    if not isinstance(golden, Mapping):
        return [REPHRASED.get(line, renamed(line, renames)) for line in golden]
    found = {renamed(name, renames): text for name, text in golden.items()}
    if len(found) < len(golden):
        raise ValueError(f"RENAMES gives two things one name: {', '.join(renames.values())}")
    return found


def difference(old: Golden, new: Golden) -> str | None:
    """Returns the first difference in words, and how many there are; None if all is equal."""
    if isinstance(old, Mapping) != isinstance(new, Mapping):
        return "one side is a run, the other one a program"
    if isinstance(old, Mapping):
        names = [  # but for what is not written any more
            name
            for name in {**old, **new}
            if not name.endswith((" late_before", " late_after", "state support", "state strategy", "state num_ranks"))
        ]
        found = [(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]
    else:
        pairs = enumerate(zip_longest(old, new), start=1)
        found = [(f"line {number}", one, other) for number, (one, other) in pairs if one != other]
    if not found:
        return None
    where, one, other = found[0]
    start = next((i for i, (a, b) in enumerate(zip(one or "", other or "", strict=False)) if a != b), 0)
    return f"{where}: {_short(one, start)} became {_short(other, start)} ({len(found)} differences)"


def _short(text: str | None, start: int) -> str:
    """Returns a text around the place where it differs."""
    if text is None:
        return "nothing"
    first = max(0, min(start - SHOWN // 2, len(text) - SHOWN))
    return f"{'...' if first else ''}{text[first : first + SHOWN]}{'...' if first + SHOWN < len(text) else ''}"


def compare(
    old: Mapping[str, Golden], new: Mapping[str, Golden], renames: Mapping[str, str] = RENAMES
) -> dict[str, str | None]:
    """Compares every case of either side; returns its first difference, None if there is none. A case that the new side
    lacks is a difference, and so is one that only the new side has: nobody knows what it was."""
    old = {renamed(name, renames): in_new_names(golden, renames) for name, golden in old.items()}
    found: dict[str, str | None] = {}
    for name in {**old, **new}:
        if name not in new or name not in old:
            found[name] = f"only the {'old' if name in old else 'new'} side has this case"
        else:
            found[name] = difference(old[name], new[name])
    return found
