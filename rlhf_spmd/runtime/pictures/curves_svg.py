"""The curves of a metric as an SVG picture inside a page: a colour for each run, one pair of axes for all of them.

Values of the iterations are a line, those of evaluations are dots on a dashed line. Nothing is cut: margins follow from
the widths of the labels, which are estimated for the widest of the usual fonts.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from rlhf_spmd.files.printing import formatted
from rlhf_spmd.runtime.pictures.axis_ticks import MOST, Tick, ticks_around, ticks_between
from rlhf_spmd.runtime.pictures.palette import FAINT_INK, INK, RULE

Point = tuple[float, float]
WIDTH, PLOT_HEIGHT = 480, 140  # of a picture, and of the part inside its axes, in pixels
SIZE, LINE = 11, 16  # of text; from one line of text to the next
EDGE = 6  # around everything
X_LABEL = "iteration"
WIDE, NARROW = "mwMW@%→—", "ijlrt.,:;'|!()[] /-"  # characters


class Series(NamedTuple):
    """What a picture shows of one run."""

    name: str
    colour: str
    line: Sequence[Point]  # (iteration, value) of training
    dots: Sequence[Point] = ()  # (iterations before it, value) of evaluations

    @property
    def ends(self) -> str:
        """The first and the last value, on held-out data if there are any."""
        points = self.dots or self.line
        return f"{formatted(points[0][1])} → {formatted(points[-1][1])}"


class Axes(NamedTuple):
    """The place of the axes in a picture, and their ranges."""

    left: float
    right: float
    top: float
    xs: tuple[float, float]
    ys: tuple[float, float]

    def x(self, x: float) -> float:
        return self.left + (x - self.xs[0]) / (self.xs[1] - self.xs[0]) * (self.right - self.left)

    def y(self, y: float) -> float:
        return self.top + (self.ys[1] - y) / (self.ys[1] - self.ys[0]) * PLOT_HEIGHT


def finite_points(pairs: Sequence[tuple[object, object]]) -> list[Point]:
    """Returns the pairs of finite numbers among (x, y)."""
    numbers = [(x, y) for x, y in pairs if isinstance(x, int | float) and isinstance(y, int | float)]
    return [(float(x), float(y)) for x, y in numbers if abs(x) < MOST and abs(y) < MOST]


def curves(title: str, series: Sequence[Series]) -> str:
    """Draws the curves of a metric.

    series: of the runs that have this metric; each has a point.
    """
    points = [point for one in series for point in (*one.line, *one.dots)]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    xs = first, max(last, first + 2.0)
    x_ticks, y_ticks = ticks_between(*xs), ticks_around(min(y for _, y in points), max(y for _, y in points))
    legend, bottom = _legend(series, LINE + 2)
    left = max(*(width_of(tick.label) + 2 * EDGE for tick in y_ticks), EDGE + width_of(x_ticks[0].label) / 2)
    right = WIDTH - EDGE - max(width_of(x_ticks[-1].label) / 2, 4)
    axes = Axes(left, right, bottom + 2 * EDGE, xs, (y_ticks[0].value, y_ticks[-1].value))
    height = axes.top + PLOT_HEIGHT + 2 * LINE + EDGE
    parts = [text(EDGE, LINE, shortened(title, WIDTH - 2 * EDGE, bold=True), INK, bold=True), *legend]
    parts += _frame(axes, x_ticks, y_ticks)
    for number, one in enumerate(series):
        num_covering = sum(_look_alike(one, later, axes) for later in series[number + 1 :])
        parts += _drawn(one, axes, 1.6 + 2.4 * min(num_covering, 4))
    said = "; ".join(f"{one.name} {one.ends}" for one in series)
    return picture(f"{title}: {said}", WIDTH, height, parts)


def picture(label: str, width: float, height: float, parts: Sequence[str]) -> str:
    """Returns an SVG element.

    label: what it shows, for readers that don't see it.
    """
    return (
        f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}">{"".join(parts)}</svg>'
    )


def text(x: float, y: float, words: str, colour: str, anchor: str = "start", *, bold: bool = False) -> str:
    """Draws words whose base line is at y; they begin (start), lie in the middle or end at x."""
    look = f'fill="{colour}" text-anchor="{anchor}" font-weight="{"bold" if bold else "normal"}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{SIZE}" {look}>{escape(words)}</text>'


def width_of(words: str, *, bold: bool = False) -> float:
    """Returns pixels that words need at most, in DejaVu Sans and narrower fonts."""
    ems = (
        1.0 if char in WIDE or ord(char) > 0x2E7F else 0.42 if char in NARROW else 0.78 if char.isupper() else 0.64
        for char in words
    )
    return SIZE * sum(ems) * (1.13 if bold else 1.0)


def shortened(words: str, width: float, *, bold: bool = False) -> str:
    """Shortens words to so many pixels, with an ellipsis for their end if they don't fit."""
    kept = words
    while kept and width_of(kept + "…" * (kept != words), bold=bold) > width:
        kept = kept[:-1]
    return kept + "…" * (kept != words)


def legend_marks(names: Sequence[str], top: float, wide: float) -> tuple[list[tuple[float, float]], float]:
    """Returns where the entries of a legend begin, in as many lines as it needs, and the base line of the last one.
    Words are 18 pixels to the right of their mark.

    wide: pixels of the picture.
    """
    marks, x, y = [], float(EDGE), top + LINE
    for name in names:
        needed = 18 + width_of(name)
        if x > EDGE and x + needed > wide - EDGE:
            x, y = float(EDGE), y + LINE
        marks.append((x, y))
        x += needed + 2 * EDGE
    return marks, y


def _legend(series: Sequence[Series], top: float) -> tuple[list[str], float]:
    """Draws a legend: the runs with their first and last values. Returns the base line of the last one, too."""
    names = [f"{shortened(one.name, WIDTH / 2)}: {one.ends}" for one in series]
    marks, bottom = legend_marks(names, top, WIDTH)
    parts = []
    for one, name, (x, y) in zip(series, names, marks, strict=True):
        parts.append(f'<rect x="{x:.1f}" y="{y - 7:.1f}" width="12" height="6" rx="2" fill="{one.colour}"/>')
        parts.append(text(x + 18, y, name, INK))
    return parts, bottom


def _frame(axes: Axes, x_ticks: Sequence[Tick], y_ticks: Sequence[Tick]) -> list[str]:
    """Returns rules at the ticks of y, marks at those of x, and the labels of both."""
    parts, bottom = [], axes.top + PLOT_HEIGHT
    for tick in y_ticks:
        y = axes.y(tick.value)
        parts.append(f'<line x1="{axes.left:.1f}" x2="{axes.right:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{RULE}"/>')
        parts.append(text(axes.left - EDGE, y + 4, tick.label, FAINT_INK, "end"))
    for tick in x_ticks:
        x = axes.x(tick.value)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom:.1f}" y2="{bottom + 4:.1f}" stroke="{FAINT_INK}"/>')
        parts.append(text(x, bottom + LINE, tick.label, FAINT_INK, "middle"))
    return [*parts, text((axes.left + axes.right) / 2, bottom + 2 * LINE, X_LABEL, FAINT_INK, "middle")]


def _look_alike(one: Series, other: Series, axes: Axes) -> bool:
    """Returns whether the second line would cover the first one."""
    near = zip(one.line, other.line, strict=False)
    return bool(one.line and other.line) and all(
        a[0] == b[0] and abs(axes.y(a[1]) - axes.y(b[1])) < 1.5 for a, b in near
    )


def _drawn(one: Series, axes: Axes, width: float) -> list[str]:
    """Draws a curve.

    width: of its line; one that others cover is wider, and so remains visible.
    """
    parts = [_line(one.line, axes, one.colour, f'stroke-width="{width:g}"')] if len(one.line) > 1 else []
    if len(one.dots) > 1:
        parts.append(_line(one.dots, axes, one.colour, 'stroke-dasharray="4 3" stroke-width="1.2"'))
    marked = [*(one.line if len(one.line) == 1 else ()), *one.dots]
    return [
        *parts,
        *(f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3" fill="{one.colour}"/>' for x, y in marked),
    ]


def _line(points: Sequence[Point], axes: Axes, colour: str, look: str) -> str:
    path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in thinned(points))
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-linejoin="round" {look}/>'


def thinned(points: Sequence[Point], columns: int = WIDTH) -> list[Point]:
    """Thins points to those that look the same in so many columns of pixels: first, lowest, highest and last of
    each."""
    if len(points) <= 4 * columns:
        return list(points)
    found, step = [], math.ceil(len(points) / columns)
    for start in range(0, len(points), step):
        part = range(start, min(start + step, len(points)))
        low, high = min(part, key=lambda i: points[i][1]), max(part, key=lambda i: points[i][1])
        found += [points[i] for i in sorted({part[0], low, high, part[-1]})]
    return found
