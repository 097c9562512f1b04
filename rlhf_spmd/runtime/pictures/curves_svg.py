"""A curve as an SVG picture inside a page: values of the iterations as a line, those of evaluations as dots."""

import math
from collections.abc import Sequence
from html import escape

from rlhf_spmd.runtime.pictures.palette import FAINT_INK, INK, MODELS, RULE

Point = tuple[float, float]
WIDTH, HEIGHT = 300, 150  # of a picture, in pixels
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 24, 18  # margins around the curve
LINE, DOTS = MODELS[0], MODELS[3]


def finite_points(pairs: Sequence[tuple[object, object]]) -> list[Point]:
    """The pairs of finite numbers among (x, y)."""
    numbers = [(x, y) for x, y in pairs if isinstance(x, int | float) and isinstance(y, int | float)]
    return [(float(x), float(y)) for x, y in numbers if math.isfinite(x) and math.isfinite(y)]


def curve(title: str, line: Sequence[Point], dots: Sequence[Point] = ()) -> str:
    """The picture. line: (iteration, value) of training; dots: (iterations before it, value) of evaluations."""
    points = [*line, *dots]
    ends = dots or line
    said = f"{short(ends[0][1])} → {short(ends[-1][1])}" if ends else "no value"
    parts = [_text(LEFT, 14, title, INK, weight="bold"), _text(WIDTH - RIGHT, 14, said, DOTS if dots else LINE, "end")]
    if points:
        xs, ys = _range([x for x, _ in points], 1.0), _range([y for _, y in points])
        parts += _frame(xs, ys)
        path = " ".join(f"{_x(x, xs):.1f},{_y(y, ys):.1f}" for x, y in line)
        if len(line) > 1:
            parts.append(f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="1.6"/>')
        elif line:
            parts.append(_dot(line[0], xs, ys, LINE))
        dotted = " ".join(f"{_x(x, xs):.1f},{_y(y, ys):.1f}" for x, y in dots)
        if len(dots) > 1:
            dashes = 'stroke-dasharray="3 3" stroke-width="1.2"'
            parts.append(f'<polyline points="{dotted}" fill="none" stroke="{DOTS}" {dashes}/>')
        parts += [_dot(point, xs, ys, DOTS) for point in dots]
    return (
        f'<svg role="img" aria-label="{escape(title)}: {escape(said)}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}">{"".join(parts)}</svg>'
    )


def short(value: float) -> str:
    """A number with four digits."""
    return f"{value:.4g}"


def _range(values: Sequence[float], least: float = 0.0) -> tuple[float, float]:
    """From the smallest to the largest value, and wider than nothing. least: the width of the range of one value."""
    low, high = min(values), max(values)
    if high > low:
        return low, high
    half = least or abs(low) * 0.1 or 1.0
    return (low, low + half) if least else (low - half, high + half)


def _x(x: float, xs: tuple[float, float]) -> float:
    return LEFT + (x - xs[0]) / (xs[1] - xs[0]) * (WIDTH - LEFT - RIGHT)


def _y(y: float, ys: tuple[float, float]) -> float:
    return HEIGHT - BOTTOM - (y - ys[0]) / (ys[1] - ys[0]) * (HEIGHT - TOP - BOTTOM)


def _frame(xs: tuple[float, float], ys: tuple[float, float]) -> list[str]:
    """Rules at the smallest and the largest value, and the numbers at both axes."""
    parts = []
    for value in ys:
        y = _y(value, ys)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{RULE}"/>')
        parts.append(_text(LEFT - 5, y + 4, short(value), FAINT_INK, "end"))
    parts.append(_text(LEFT, HEIGHT - 4, f"{xs[0]:g}", FAINT_INK))
    parts.append(_text(WIDTH - RIGHT, HEIGHT - 4, f"{xs[1]:g}", FAINT_INK, "end"))
    return parts


def _dot(point: Point, xs: tuple[float, float], ys: tuple[float, float], colour: str) -> str:
    return f'<circle cx="{_x(point[0], xs):.1f}" cy="{_y(point[1], ys):.1f}" r="3" fill="{colour}"/>'


def _text(x: float, y: float, words: str, colour: str, anchor: str = "start", *, weight: str = "normal") -> str:
    look = f'fill="{colour}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y:.1f}" font-size="11" {look}>{escape(words)}</text>'
