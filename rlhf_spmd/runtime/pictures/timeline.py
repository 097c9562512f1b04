"""Timelines as a picture: one lane per rank, a hue per model, a shade per kind of call, gaps where a rank idles.

Measured runs and forecasts are drawn by the same functions, one alone or several on one axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_spmd.plan.layout import format_ranks
from rlhf_spmd.plan.workflow import Workflow
from rlhf_spmd.runtime.pictures import palette
from rlhf_spmd.runtime.pictures.palette import FAINT_INK, INK, TRANSFER, WAITING, Style, styles_of
from rlhf_spmd.runtime.pictures.picture import CHARACTER, SMALL, TEXT, WIDTH, Area, Picture
from rlhf_spmd.runtime.world.trace import Lane, Span, busy_fraction, lanes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEFT, RIGHT = 0.92, 0.55  # inches beside the lanes: the rank's name, its busy share
LANE_INCH = (0.12, 0.36)  # smallest and largest height of a lane
STACK_INCH = 0.26  # the largest height of a lane in a stack
ALL_LANES_INCH = 6.5  # the height that the lanes of a picture may take before they get thin
LABELLED_INCH, TWO_LINES_INCH = 0.16, 0.32  # the smallest height of a lane with text, and with two lines of it
# looks of words above the first lane
ABOVE: dict[str, Any] = {"textcoords": "offset points", "fontsize": SMALL, "color": FAINT_INK, "va": "bottom"}
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
    """Draws the last iterations in the records that `Tracer.to_records` of every rank returned.

    most_lanes: if there are more ranks, those that do the same share a lane.
    """
    shown = last_iterations(lanes(records), num_iterations)
    start_s, end_s = ends_of(shown)
    starts: dict[int, float] = {}  # iteration, from 1 -> seconds when its first rank began it
    drawn: dict[int, object] = {}  # iteration -> that which is drawn meanwhile, from 0, if it is another one
    for span in sorted((span for lane in shown for span in lane.spans), key=lambda span: span.start_s):
        if span.iteration is not None:
            starts.setdefault(span.iteration + 1, span.start_s - start_s)
            if "iteration" in span.args:
                drawn[span.iteration + 1] = span.args["iteration"]
    words, axis = "", "seconds"
    if starts:
        first, last = min(starts), max(starts)
        words = f"iteration {first}: " if first == last else f"iterations {first} to {last}: "
        axis = f"seconds since the start of iteration {first}"
    picture = Picture()
    picture.title(title, f"{words}{end_s - start_s:.2f} s{_busy_text(shown)}")
    stack = _Stack(workflow, [shown], most_lanes, LANE_INCH[1])
    also = {number: f", drawing {int(str(other)) + 1}" for number, other in drawn.items()}
    named = {f"iteration {number}{also.get(number, '')}": s for number, s in starts.items()}
    stack.add(picture, 0, top=0.24, starts=named)
    stack.add_axis(picture, axis)
    picture.legend(stack.legend())
    picture.save(path)


def add_stack(
    picture: Picture, panels: Sequence[Panel], *, workflow: Workflow, most_lanes: int | None = None
) -> list[Style]:
    """Draws timelines of one iteration each, below each other on one axis of seconds. Returns the styles for the
    legend.

    most_lanes: of the whole stack; if there are more ranks, those of a timeline that do the same share a lane.
    """
    found = [lanes(panel.records) for panel in panels]
    stack = _Stack(workflow, found, most_lanes, STACK_INCH)
    beside = LEFT + CHARACTER * TEXT * 1.2 * (max(len(panel.title) for panel in panels) + 1)
    for number, (panel, shown) in enumerate(zip(panels, found, strict=True)):
        start_s, end_s = ends_of(shown)
        words = f"{end_s - start_s:.3g} s{_busy_text(shown)}{', ' if panel.note else ''}{panel.note}"
        stack.add(picture, number, top=0.29, heading=((LEFT, panel.title), (beside, words)))
    stack.add_axis(picture, "seconds since the start of the iteration")
    return stack.legend()


def last_iterations(all_lanes: Sequence[Lane], num_iterations: int) -> list[Lane]:
    """Returns the lanes cut to the last iterations; spans without an iteration stay if they fall between them. The last
    step of a run that draws ahead draws nothing, and is left out unless it is the only one."""
    known = sorted({span.iteration for lane in all_lanes for span in lane.spans if span.iteration is not None})
    if not known:
        return list(all_lanes)
    ahead = {span.iteration for lane in all_lanes for span in lane.spans if "iteration" in span.args}
    if ahead and known[-1] not in ahead and len(known) > 1:
        known.pop()
    wanted = set(known[-num_iterations:])

    def cut(belongs) -> list[Lane]:
        return [Lane(lane.rank, lane.host, tuple(filter(belongs, lane.spans))) for lane in all_lanes]

    low, high = ends_of(cut(lambda span: span.iteration in wanted))
    return cut(
        lambda span: span.iteration in wanted or (span.iteration is None and low <= span.start_s and span.end_s <= high)
    )


def ends_of(shown: Sequence[Lane]) -> tuple[float, float]:
    """Returns when the first span begins and the last one ends."""
    spans = [span for lane in shown for span in lane.spans]
    return min((span.start_s for span in spans), default=0.0), max((span.end_s for span in spans), default=1.0)


def _busy_text(shown: Sequence[Lane]) -> str:
    ends = ends_of(shown)
    return f", ranks busy {100 * mean(busy_fraction(lane.spans, *ends) for lane in shown):.0f}%" if shown else ""


class _Stack:
    """Draws timelines below each other on one axis of seconds."""

    def __init__(
        self, workflow: Workflow, timelines: Sequence[Sequence[Lane]], most_lanes: int | None, largest_inch: float
    ):
        self.calls = styles_of(workflow)
        self.ends = [ends_of(shown) for shown in timelines]
        self.width_s = max(end_s - start_s for start_s, end_s in self.ends)
        self.styles = {self.style_of(span) for shown in timelines for lane in shown for span in lane.spans}
        together = most_lanes is not None and sum(map(len, timelines)) > most_lanes
        self.rows = [self._rows(shown, together) for shown in timelines]
        self.lane_inch = min(largest_inch, max(LANE_INCH[0], ALL_LANES_INCH / max(1, sum(map(len, self.rows)))))

    def style_of(self, span: Span) -> Style:
        return palette.SPANS.get(span.category) or self.calls.get(span.name) or palette.other(span.name)

    def legend(self) -> list[Style]:
        """Returns every style that occurs: calls in their order, then other computation, then the rest."""
        calls = [style for style in dict.fromkeys(self.calls.values()) if style in self.styles]
        rest = [style for style in (palette.CONTROL, TRANSFER, WAITING) if style in self.styles]
        return [*calls, *sorted(self.styles.difference(calls, rest)), *rest, palette.IDLE_STYLE]

    def _rows(self, shown: Sequence[Lane], together: bool) -> list[DrawnLane]:
        """Returns a row for each lane, or one for all lanes that do the same at the same time."""
        if not together:
            return [DrawnLane((lane.rank,), lane.host, lane.spans) for lane in shown]
        groups: dict[tuple, list[tuple[list[float], list[Lane]]]] = {}  # by the calls, then by their times
        for lane in shown:
            looks = frozenset(map(self.style_of, lane.spans)) - {WAITING}
            runs = [run for run in self._runs(lane.spans) if run[2] - run[1] > ALIKE * self.width_s]
            times = [s for _, *ends in runs for s in ends]
            alike = groups.setdefault((looks, *(style for style, *_ in runs)), [])
            for theirs, group in alike:
                if all(abs(a - b) <= ALIKE * self.width_s for a, b in zip(times, theirs, strict=True)):
                    group.append(lane)
                    break
            else:
                alike.append((times, [lane]))
        found = sorted((group for alike in groups.values() for _, group in alike), key=lambda group: group[0].rank)
        return [DrawnLane(tuple(lane.rank for lane in group), "", group[0].spans) for group in found]

    def _runs(self, spans: Sequence[Span]) -> list[tuple[Style, float, float]]:
        """Returns (style, start, end) of spans; neighbours of the same style, such as mini-batches, are joined."""
        runs: list[tuple[Style, float, float]] = []
        for span in spans:
            style = self.style_of(span)
            if runs and runs[-1][0] == style and span.start_s - runs[-1][2] < 0.002 * self.width_s:
                runs[-1] = style, runs[-1][1], max(runs[-1][2], span.end_s)
            else:
                runs.append((style, span.start_s, span.end_s))
        return runs

    def add(
        self,
        picture: Picture,
        number: int,
        *,
        top: float,
        heading: Sequence[tuple[float, str]] = (),
        starts: Mapping[str, float] = {},
    ) -> None:
        """Adds a timeline.

        heading: its title and facts, with their x.
        starts: of iterations, marked by lines.
        """

        def part(area: Area) -> None:
            looks = ("bold", INK), ("normal", FAINT_INK)
            for (x, words), (weight, colour) in zip(heading, looks, strict=False):
                area.text(x, 0.17, words, fontweight=weight, colour=colour)
            axes = self._lanes(area, number, top)
            for words, x in starts.items():
                axes.axvline(x, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=7, clip_on=False)
                axes.annotate(words, (x, -0.5), (2, 2), annotation_clip=False, **ABOVE)

        picture.add(top + self.lane_inch * max(1, len(self.rows[number])), part)

    def add_axis(self, picture: Picture, label: str) -> None:
        """Draws the axis of seconds below all lanes."""

        def part(area: Area) -> None:
            axes = area.axes(LEFT, 0.03, WIDTH - LEFT - RIGHT, 0.001)
            axes.set_xlim(0, self.width_s)
            axes.set_yticks([])
            axes.spines[["top", "left", "right"]].set_visible(False)
            axes.spines["bottom"].set_color(palette.RULE)
            axes.tick_params(length=3, labelsize=SMALL, color=FAINT_INK, labelcolor=INK)
            axes.set_xlabel(label, fontsize=TEXT, color=INK)

        picture.add(0.5, part)

    def _lanes(self, area: Area, number: int, top: float) -> Axes:
        """Draws the lanes of a timeline, with their busy shares at the right; the first one has a heading for them."""
        rows, (start_s, end_s) = self.rows[number], self.ends[number]
        axes = area.axes(LEFT, top, WIDTH - LEFT - RIGHT, self.lane_inch * max(1, len(rows)))
        axes.set_xlim(0, self.width_s)
        axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
        for row, lane in enumerate(rows):
            axes.broken_barh([(0, end_s - start_s)], (row - 0.42, 0.84), facecolor=palette.IDLE, linewidth=0, zorder=1)
            self._draw_spans(axes, row, lane.spans, start_s)
            if self.lane_inch >= LABELLED_INCH:
                self._write_words(axes, row, lane.spans, start_s)
            if row and lane.host != rows[row - 1].host:  # another node starts here
                axes.axhline(row - 0.5, color=FAINT_INK, linewidth=0.8, zorder=7)
        step = max(1, ceil(LABELLED_INCH / self.lane_inch))
        axes.set_yticks(range(0, len(rows), step), [row.label for row in rows[::step]])
        axes.tick_params(length=0, labelsize=SMALL, labelcolor=INK)
        right = axes.get_yaxis_transform()
        for row in range(0, len(rows), step):
            share = f"{100 * busy_fraction(rows[row].spans, start_s, end_s):.0f}%"
            axes.text(1.008, row, share, transform=right, fontsize=SMALL, color=FAINT_INK, va="center")
        if number == 0:
            axes.annotate("busy", (1.008, -0.5), (0, 2), xycoords=right, annotation_clip=False, **ABOVE)
        return axes

    def _draw_spans(self, axes: Axes, row: int, spans: Sequence[Span], start_s: float) -> None:
        by_style: dict[Style, list[tuple[float, float]]] = {}
        for span in spans:
            by_style.setdefault(self.style_of(span), []).append((span.start_s - start_s, span.end_s - span.start_s))
        for style, bars in by_style.items():
            bottom, height, layer = row - 0.42, 0.84, 3
            if style == TRANSFER:  # may run beside a call
                bottom, height, layer = row + 0.24, 0.18, 5
            elif style in (WAITING, palette.CONTROL):
                layer = 4
            edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.6} if layer == 3 else {"linewidth": 0}
            if style.hatch:
                edge |= {"hatch": style.hatch, "edgecolor": style.edge}
            # a white edge separates neighbours, but would cover a span of a pixel or two
            for is_wide, looks in ((False, {"linewidth": 0}), (True, edge)):
                some = [bar for bar in bars if (bar[1] > 0.006 * self.width_s) == is_wide]
                axes.broken_barh(some, (bottom, height), zorder=layer, facecolor=style.colour, **looks)

    def _write_words(self, axes: Axes, row: int, spans: Sequence[Span], start_s: float) -> None:
        """Writes the names of spans into them; joined neighbours share one."""
        for style, begin, end in self._runs([span for span in spans if self.style_of(span).words]):
            room = (end - begin) / self.width_s * (WIDTH - LEFT - RIGHT) / (CHARACTER * SMALL) - 1.5  # characters
            shown = [word for word in style.words if "\n" not in word or self.lane_inch >= TWO_LINES_INCH]
            word = next((word for word in shown if max(map(len, word.split("\n"))) <= room), None)
            if word is not None:
                axes.text(
                    (begin + end) / 2 - start_s, row, word, ha="center", va="center", fontsize=SMALL, linespacing=0.95,
                    zorder=6, clip_on=True, color=style.ink,
                    bbox={"facecolor": style.colour, "edgecolor": "none", "pad": 1.0},
                )  # fmt: skip
