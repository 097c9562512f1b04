"""Regular expressions from the folders of others, matched in a bounded number of steps. Plain Python without torch.

`re` tries one way through an expression after the other, so that for (a+)+b the time doubles with each letter. Here a
set of places in the text moves through the expression, and each part of it is asked once for each place: the steps are
at most the parts times the cube of the text's length.
"""

import functools
import re
from re import _compiler, _parser  # type: ignore[attr-defined]  # those of `re`, so the language is the same
from typing import Any

from rlhf_spmd.errors import UserError

LONGEST = 500  # characters of a text that can match: the path of a layer has some 50
SINGLE = ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT")  # parts of an expression that have one way


@functools.lru_cache(maxsize=2**16)
def matches(expression: str, text: str) -> bool:
    """Returns whether an expression matches a whole text. Raises UserError for a wrong one, and for one that refers to
    its own groups, which cannot be matched so."""
    try:
        tree = _parsed(expression)
        return len(text) <= LONGEST and len(text) in _Match(text).after(tree, tree.state.flags, 0)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(
            f"the pattern {expression[:99]!r} is not a regular expression that is read here ({error}); correct it, or "
            "name the layers"
        ) from None


@functools.lru_cache(maxsize=256)
def _parsed(expression: str) -> Any:
    return _parser.parse(expression)


class _Match:
    """One text, with the places to which each part of an expression leads from each place."""

    def __init__(self, text: str):
        self.text = text
        self._known: dict[tuple[int, int], set[int]] = {}
        self._single: dict[int, re.Pattern[str]] = {}

    def after(self, parts: Any, flags: int, start: int) -> set[int]:
        """Returns the places to which a sequence of parts leads."""
        places = {start}
        for part in parts:
            places = {end for place in places for end in self._after_part(part, flags, place)}
        return places

    def _after_part(self, part: Any, flags: int, start: int) -> set[int]:
        key = id(part), start
        if key not in self._known:
            self._known[key] = self._found(part, flags, start)
        return self._known[key]

    def _found(self, part: Any, flags: int, start: int) -> set[int]:
        kind, value = str(part[0]), part[1]
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            return self._repeated(value, flags, start)
        if kind == "BRANCH":
            return {end for one in value[1] for end in self.after(one, flags, start)}
        if kind == "SUBPATTERN":
            return self.after(value[3], (flags | value[1]) & ~value[2], start)
        if kind in ("ASSERT", "ASSERT_NOT"):
            behind = value[1].getwidth()[0] if value[0] < 0 else 0
            ends = self.after(value[1], flags, start - behind) if start >= behind else set()
            found = start in ends if value[0] < 0 else bool(ends)
            return {start} if found == (kind == "ASSERT") else set()
        if kind not in SINGLE:
            raise re.error(f"it has a part of the kind {kind}")
        if id(part) not in self._single:
            self._single[id(part)] = _compiler.compile(_parser.SubPattern(_parser.State(), [part]), flags)
        match = self._single[id(part)].match(self.text, start)
        return {match.end()} if match else set()

    def _repeated(self, repeat: Any, flags: int, start: int) -> set[int]:
        least, most, inner = repeat
        places, found, times = {start}, set[int](), 0
        while times <= most and not (places <= found if times >= least else not places):
            found |= places if times >= least else set()
            following = {end for place in places for end in self.after(inner, flags, place)}
            times = max(times + 1, least) if following == places else times + 1
            places = following
        return found
