"""Timelines as a picture: one lane per rank, a hue per model, a shade per kind of call, gaps where a rank idles.

Measured runs and forecasts are drawn by the same functions, one alone or several on one axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlhf_spmd.plan.layout import format_ranks
from rlhf_spmd.plan.workflow import Workflow
from rlhf_spmd.runtime.observe.trace import Lane, Span, busy_fraction, lanes
from rlhf_spmd.runtime.run import palette
from rlhf_spmd.runtime.run.palette import FAINT_INK, INK, TRANSFER, WAITING, Style, styles_of
from rlhf_spmd.runtime.run.picture import CHARACTER, SMALL, TEXT, WIDTH, Area, Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEFT, RIGHT = 0.92, 0.55  # inches beside the lanes: the rank's name, its busy share
LANE_INCH = (0.12, 0.36)  # smallest and largest height of a lane
ALL_LANES_INCH = 6.5  # the height that the lanes of a picture may take before they get thin
LABELLED_INCH = 0.16  # the smallest height of a lane with text
ALIKE = 0.02  # of the picture's width: ranks share a lane if their spans differ by no more


class Panel(NamedTuple):
    """One timeline of a stack."""

    title: str
    records: Sequence[Mapping[str, object]]  # from `Tracer.to_records` of every rank
    note: str = ""


class DrawnLane(NamedTuple):
    """A lane of the picture: one rank, or several that do the same at the same time."""

    ranks: tuple[int, ...]
    host: str
    spans: tuple[Span, ...]

    @property
    def label(self) -> str:
        words = format_ranks(self.ranks)
        if len(self.ranks) == 1:
            return f"rank {words}"
        return f"ranks {words}" if len(words) <= 7 else f"{len(self.ranks)} ranks"


def write_png(
    path: str | Path,
    records: Sequence[Mapping[str, object]],
    *,
    title: str,
    workflow: Workflow,
    num_iterations: int = 2,
    most_lanes: int | None = None,
) -> None:
    """Draws the last iterations in the records that `Tracer.to_records` of every rank returned. most_lanes: if there
    are more ranks, those that do the same share a lane."""
    shown = last_iterations(lanes(records), num_iterations)
    spans = [span for lane in shown for span in lane.spans]
    start_s, end_s = _ends(spans)
    busy = [busy_fraction(lane.spans, start_s, end_s) for lane in shown]
    mean = f", ranks busy {100 * sum(busy) / len(busy):.0f}%" if busy else ""
    picture = Picture()
    picture.title(title, f"{_iterations_text(spans)}{end_s - start_s:.2f} s{mean}")
    style_of = _Styles(workflow)
    rows = _rows(shown, style_of, end_s - start_s, most_lanes is not None and len(shown) > most_lanes)
    height = _lane_inch(len(rows))
    marks = _starts(spans, start_s)
    draw = partial(_panel, rows=rows, style_of=style_of, start_s=start_s, width=end_s - start_s, lane_inch=height)
    picture.add(0.24 + height * max(1, len(rows)), partial(draw, top=0.24, marks=marks))
    first = min(marks, default=None)
    _axis(picture, end_s - start_s, "seconds" if first is None else f"seconds since the start of iteration {first}")
    picture.legend(style_of.legend(spans))
    picture.save(path)


def add_stack(
    picture: Picture, panels: Sequence[Panel], *, workflow: Workflow, most_lanes: int | None = None
) -> list[Style]:
    """Timelines of one iteration each, below each other on one axis of seconds. Returns the styles for the legend.
    most_lanes: of the whole stack; if there are more ranks, those of a timeline that do the same share a lane."""
    style_of = _Styles(workflow)
    found = [lanes(panel.records) for panel in panels]
    ends = [_ends([span for lane in shown for span in lane.spans]) for shown in found]
    width = max(end_s - start_s for start_s, end_s in ends)
    together = most_lanes is not None and sum(map(len, found)) > most_lanes
    rows = [_rows(shown, style_of, width, together) for shown in found]
    height = _lane_inch(sum(map(len, rows)), largest=0.26)
    beside = LEFT + CHARACTER * TEXT * 1.2 * (max(len(panel.title) for panel in panels) + 1)
    for number, (panel, mine, (start_s, end_s)) in enumerate(zip(panels, rows, ends, strict=True)):
        busy = [busy_fraction(row.spans, start_s, end_s) for row in mine for _ in row.ranks]
        share = f", ranks busy {100 * sum(busy) / max(1, len(busy)):.0f}%"
        words = f"{end_s - start_s:.3g} s{share}{', ' if panel.note else ''}{panel.note}"
        draw = partial(_panel, rows=mine, style_of=style_of, start_s=start_s, width=width, lane_inch=height)
        draw = partial(draw, ends_s=end_s, first=not number)

        def part(area, title=panel.title, words=words, draw=draw) -> None:
            area.text(LEFT, 0.17, title, fontweight="bold")
            area.text(beside, 0.17, words, colour=FAINT_INK)
            draw(area, top=0.29)

        picture.add(0.29 + height * max(1, len(mine)), part)
    _axis(picture, width, "seconds since the start of the iteration")
    return style_of.legend(span for shown in found for lane in shown for span in lane.spans)


class _Styles:
    """The style of a span, by its call."""

    def __init__(self, workflow: Workflow):
        self.calls = styles_of(workflow)

    def __call__(self, span: Span) -> Style:
        known = {"transfer": TRANSFER, "wait": WAITING, "control": palette.CONTROL}.get(span.category)
        return known or self.calls.get(span.name) or palette.other(span.name)

    def legend(self, spans: Iterable[Span]) -> list[Style]:
        """Every style that occurs: calls in their order, then other computation, then what is not computation."""
        found = {self(span): None for span in spans}
        calls = [style for style in dict.fromkeys(self.calls.values()) if style in found]
        rest = [style for style in (palette.CONTROL, TRANSFER, WAITING) if style in found]
        more = sorted(style for style in found if style not in calls and style not in rest)
        return [*calls, *more, *rest, palette.IDLE_STYLE]


# ---- what is shown ---------------------------------------------------------------------------------------------------


def last_iterations(all_lanes: Sequence[Lane], num_iterations: int) -> list[Lane]:
    """The lanes cut to the last iterations; spans without an iteration stay if they fall between them."""
    known = sorted({span.iteration for lane in all_lanes for span in lane.spans if span.iteration is not None})
    if not known:
        return list(all_lanes)
    wanted = set(known[-num_iterations:])
    low, high = _ends([span for lane in all_lanes for span in lane.spans if span.iteration in wanted])

    def belongs(span: Span) -> bool:
        return span.iteration in wanted or (span.iteration is None and low <= span.start_s and span.end_s <= high)

    return [Lane(lane.rank, lane.host, tuple(filter(belongs, lane.spans))) for lane in all_lanes]


def _ends(spans: Sequence[Span]) -> tuple[float, float]:
    return min((span.start_s for span in spans), default=0.0), max((span.end_s for span in spans), default=1.0)


def _rows(shown: Sequence[Lane], style_of: _Styles, width_s: float, together: bool) -> list[DrawnLane]:
    """A row for each lane, or one for all lanes that do the same at the same time."""
    if not together:
        return [DrawnLane((lane.rank,), lane.host, lane.spans) for lane in shown]
    groups: dict[tuple, list[tuple[list[float], list[Lane]]]] = {}  # by the calls, then by their times
    for lane in shown:
        looks = frozenset(map(style_of, lane.spans)) - {WAITING}
        runs = [run for run in _runs(lane.spans, style_of, width_s) if run[2] - run[1] > ALIKE * width_s]
        times = [s for _, *ends in runs for s in ends]
        alike = groups.setdefault((looks, *(style for style, *_ in runs)), [])
        for theirs, group in alike:
            if all(abs(a - b) <= ALIKE * width_s for a, b in zip(times, theirs, strict=True)):
                group.append(lane)
                break
        else:
            alike.append((times, [lane]))
    found = sorted((group for alike in groups.values() for _, group in alike), key=lambda group: group[0].rank)
    return [DrawnLane(tuple(lane.rank for lane in group), "", group[0].spans) for group in found]


def _runs(spans: Sequence[Span], style_of: _Styles, width_s: float) -> list[tuple[Style, float, float]]:
    """(style, start, end) of spans; neighbours of the same style, such as mini-batches, are joined."""
    runs: list[tuple[Style, float, float]] = []
    for span in spans:
        style = style_of(span)
        if runs and runs[-1][0] == style and span.start_s - runs[-1][2] < 0.002 * width_s:
            runs[-1] = style, runs[-1][1], max(runs[-1][2], span.end_s)
        else:
            runs.append((style, span.start_s, span.end_s))
    return runs


def _lane_inch(num_lanes: int, largest: float = LANE_INCH[1]) -> float:
    return min(largest, max(LANE_INCH[0], ALL_LANES_INCH / max(1, num_lanes)))


def _starts(spans: Iterable[Span], start_s: float) -> dict[int, float]:
    """Iteration -> seconds after `start_s` when its first rank began it."""
    starts: dict[int, float] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.iteration is not None:
            starts.setdefault(span.iteration, span.start_s - start_s)
    return starts


def _iterations_text(spans: Iterable[Span]) -> str:
    numbers = sorted({span.iteration for span in spans if span.iteration is not None})
    if not numbers:
        return ""
    words = f"iteration {numbers[0]}" if len(numbers) == 1 else f"iterations {numbers[0]} to {numbers[-1]}"
    return f"{words}: "


# ---- drawing ---------------------------------------------------------------------------------------------------------


def _panel(
    area: Area,
    rows: Sequence[DrawnLane],
    style_of: _Styles,
    start_s: float,
    width: float,
    lane_inch: float,
    *,
    top: float,
    marks: Mapping[int, float] = {},
    ends_s: float | None = None,
    first: bool = True,
) -> None:
    """Lanes on an axis of `width` seconds. marks: starts of iterations; ends_s: end of this timeline; first: writes a
    heading above the shares at the right."""
    inches = WIDTH - LEFT - RIGHT
    length = width if ends_s is None else ends_s - start_s
    axes = area.axes(LEFT, top, inches, lane_inch * max(1, len(rows)))
    axes.set_xlim(0, width)
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    for row, lane in enumerate(rows):
        axes.broken_barh([(0, length)], (row - 0.42, 0.84), facecolor=palette.IDLE, linewidth=0, zorder=1)
        _draw_spans(axes, row, lane.spans, style_of, start_s, width)
        if lane_inch >= LABELLED_INCH:
            _write_words(axes, row, lane.spans, style_of, start_s, width, inches)
    step = max(1, ceil(LABELLED_INCH / lane_inch))
    axes.set_yticks(range(0, len(rows), step), [row.label for row in rows[::step]])
    axes.tick_params(length=0, labelsize=SMALL, labelcolor=INK)
    right = axes.get_yaxis_transform()
    for row in range(0, len(rows), step):
        share = busy_fraction(rows[row].spans, start_s, start_s + length)
        axes.text(1.008, row, f"{100 * share:.0f}%", transform=right, fontsize=SMALL, color=FAINT_INK, va="center")
    if first:
        axes.annotate("busy", (1.008, -0.5), (0, 2), xycoords=right, textcoords="offset points", fontsize=SMALL,
                      color=FAINT_INK, va="bottom", annotation_clip=False)  # fmt: skip
    for row in range(1, len(rows)):
        if rows[row].host != rows[row - 1].host:  # another node starts here
            axes.axhline(row - 0.5, color=FAINT_INK, linewidth=0.8, zorder=7)
    for number, x in sorted(marks.items()):
        axes.axvline(x, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=7, clip_on=False)
        axes.annotate(f"iteration {number}", (x, -0.5), (2, 2), textcoords="offset points", fontsize=SMALL,
                      color=FAINT_INK, va="bottom", annotation_clip=False)  # fmt: skip


def _draw_spans(axes: Axes, row: int, spans: Sequence[Span], style_of: _Styles, start_s: float, width: float) -> None:
    by_style: dict[Style, list[Span]] = {}
    for span in spans:
        by_style.setdefault(style_of(span), []).append(span)
    for style, mine in by_style.items():
        bottom, height, layer = (row - 0.42, 0.84, 3)
        if style == TRANSFER:  # may run beside a call
            bottom, height, layer = (row + 0.24, 0.18, 5)
        elif style in (WAITING, palette.CONTROL):
            layer = 4
        for wide in (False, True):  # a white edge separates neighbours, but would cover a span of a pixel or two
            bars = [(one.start_s - start_s, one.end_s - one.start_s) for one in mine]
            bars = [bar for bar in bars if (bar[1] > 0.006 * width) == wide]
            looks = {"facecolor": style.colour, "linewidth": 0}
            if style.hatch and wide:
                looks |= {"hatch": style.hatch, "edgecolor": style.edge}
            elif layer == 3 and wide:
                looks |= {"edgecolor": "white", "linewidth": 0.6}
            axes.broken_barh(bars, (bottom, height), zorder=layer, **looks)


def _write_words(
    axes: Axes, row: int, spans: Sequence[Span], style_of: _Styles, start_s: float, width: float, inches: float
) -> None:
    """Writes the names of spans into them; joined neighbours share one."""
    for style, start, end in _runs([span for span in spans if style_of(span).words], style_of, width):
        room = (end - start) / width * inches / (CHARACTER * SMALL) - 1.5  # characters
        word = next((word for word in style.words if len(word) <= room), None)
        if word is not None:
            axes.text(
                (start + end) / 2 - start_s, row, word, ha="center", va="center_baseline", fontsize=SMALL, zorder=6,
                clip_on=True, color=style.ink, bbox={"facecolor": style.colour, "edgecolor": "none", "pad": 1.0},
            )  # fmt: skip


def _axis(picture: Picture, width: float, label: str) -> None:
    """The axis of seconds below all lanes."""

    def part(area: Area) -> None:
        axes = area.axes(LEFT, 0.03, WIDTH - LEFT - RIGHT, 0.001)
        axes.set_xlim(0, width)
        axes.set_yticks([])
        axes.spines[["top", "left", "right"]].set_visible(False)
        axes.spines["bottom"].set_color(palette.RULE)
        axes.tick_params(length=3, labelsize=SMALL, color=FAINT_INK, labelcolor=INK)
        axes.set_xlabel(label, fontsize=TEXT, color=INK)

    picture.add(0.5, part)
