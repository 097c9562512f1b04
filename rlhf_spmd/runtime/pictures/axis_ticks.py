"""Round numbers for the ticks of an axis, at least three, with labels that name them exactly."""

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import NamedTuple

MOST = 1e300  # numbers below it have ticks
STEPS = ("1", "2", "2.5", "5")
PLAIN = 1e-3, 1e6  # the largest number of an axis has no exponent if it lies between these


class Tick(NamedTuple):
    value: float
    label: str


def ticks_around(low: float, high: float, most: int = 6) -> list[Tick]:
    """Returns the ticks from the last round number up to `low` to the first one from `high` on."""
    low, high = _apart(low, high)
    for step in _steps(high - low, STEPS):
        first, last = math.floor(Decimal(low) / step), math.ceil(Decimal(high) / step)
        if last - first < most:
            return _labelled(first, last, step)
    raise AssertionError("steps grow")


def ticks_between(low: float, high: float, most: int = 8) -> list[Tick]:
    """Returns the round whole numbers from `low` to `high`, which are whole numbers, too, at least 2 apart."""
    low, high = _apart(low, high)
    for step in _steps(high - low, ("1", "2", "5")):
        first, last = math.ceil(Decimal(low) / step), math.floor(Decimal(high) / step)
        if step >= 1 and last - first < most:
            return _labelled(first, last, step)
    raise AssertionError("steps grow")


def _apart(low: float, high: float) -> tuple[float, float]:
    """Returns a range that floats can divide, around the two numbers if they are (almost) the same."""
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    half = max(abs(low), abs(high)) * 0.1 or 1.0
    return low - half, high + half


def _steps(width: float, of_ten: tuple[str, ...]) -> Iterator[Decimal]:
    """Yields round numbers, from one that is far smaller than a width on."""
    exponent = math.floor(math.log10(width)) - 2
    while True:
        yield from (Decimal(step).scaleb(exponent) for step in of_ten)
        exponent += 1


def _labelled(first: int, last: int, step: Decimal) -> list[Tick]:
    """Returns the multiples of a step, all with as many digits after the point."""
    values = [number * step for number in range(first, last + 1)]
    largest = max(map(abs, values))
    if PLAIN[0] <= largest < PLAIN[1]:
        digits = max(0, -int(step.normalize().as_tuple().exponent))
        return [Tick(float(value), f"{value:.{digits}f}") for value in values]
    return [Tick(float(value), f"{value.normalize():e}".replace("e+", "e") if value else "0") for value in values]
