"""A value of the plan as text that stays the same when a class gets another name or a new field with a default."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import lru_cache
from typing import Any


def stable_text(value: Any, shown: frozenset[type] = frozenset()) -> str:
    """Returns data and frozen dataclasses as text: those of their fields that are compared, shown and not at their
    default, by name. Raises TypeError for what has no such text.

    shown: classes whose values are written by `str`.
    """
    return _writer(value.__class__, shown)(value)


@lru_cache
def _writer(kind: type, shown: frozenset[type]) -> Callable[[Any], str]:
    if kind in shown:
        return str
    if is_dataclass(kind):
        defaults = [(part.name, _default(part)) for part in fields(kind) if part.repr and part.compare]
        return lambda value: _with_names(value, defaults, shown)
    if kind is type(None) or issubclass(kind, bool | int | float | str):
        return repr
    if issubclass(kind, range):
        return lambda value: f"{value.start}:{value.stop}:{value.step}"
    if issubclass(kind, Mapping):
        return lambda value: (
            "{" + ", ".join([f"{key!r}: {stable_text(own, shown)}" for key, own in value.items()]) + "}"
        )
    if issubclass(kind, Set):
        return lambda value: "{" + ", ".join(sorted(stable_text(own, shown) for own in value)) + "}"
    if issubclass(kind, Sequence):
        return lambda value: "[" + ", ".join([stable_text(own, shown) for own in value]) + "]"
    raise TypeError(f"{kind.__name__} has no stable text")


def _with_names(value: Any, defaults: list[tuple[str, Any]], shown: frozenset[type]) -> str:
    found = ((name, getattr(value, name), default) for name, default in defaults)
    parts = [f"{name}={stable_text(own, shown)}" for name, own, default in found if own != default]
    return "(" + ", ".join(parts) + ")"


def _default(part: Field[Any]) -> Any:
    if not part.init:
        return MISSING
    return part.default_factory() if part.default_factory is not MISSING else part.default
