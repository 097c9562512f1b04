"""Timelines as a picture: one lane per rank, a hue per model, a shade per kind of call, gaps where a rank idles.

Measured runs and forecasts are drawn by the same functions, one alone or several on one axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from rlhf_spmd.plan.calls import Workflow
from rlhf_spmd.plan.layout import format_ranks
from rlhf_spmd.runtime.pictures import palette
from rlhf_spmd.runtime.pictures.palette import FAINT_INK, INK, SPANS, TRANSFER, Style, styles_of
from rlhf_spmd.runtime.pictures.picture import CHARACTER, SMALL, TEXT, WIDTH, Area, Picture
from rlhf_spmd.runtime.world.trace import Lane, Span, busy_fraction, lanes

LEFT, RIGHT = 0.92, 0.72  # inches beside the lanes: the rank's name, its busy share
LANE_INCH = (0.12, 0.36)  # smallest and largest height of a lane
STACK_INCH = 0.26  # the largest height of a lane in a stack
ALL_LANES_INCH = 6.5  # the height that the lanes of a picture may take before they get thin
LABELLED_INCH, TWO_LINES_INCH = 0.16, 0.32  # the smallest height of a lane with text, and with two lines of it
# looks of words above the first lane
ABOVE: dict[str, Any] = {"textcoords": "offset points", "fontsize": SMALL, "color": FAINT_INK, "va": "bottom"}
ALIKE = 0.02  # of the picture's width: ranks share a lane if their spans differ by no more
NARROW = 0.006  # of the picture's width: spans that would be hidden by their edges
JOINED = 0.002  # of the picture's width: the gap between spans that are drawn as one

Run = tuple[Style, float, float]  # style, start, end of spans that are drawn as one


class Panel(NamedTuple):
    """One timeline of a stack."""

    title: str
    records: Sequence[Mapping[str, object]]  # from `Tracer.to_records` of every rank
    note: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A lane of the picture: one rank, or several that do the same at the same time."""

    ranks: list[int]
    host: str
    spans: Sequence[Span]

    @property
    def label(self) -> str:
        words = format_ranks(tuple(self.ranks))
        if len(self.ranks) == 1:
            return f"rank {words}"
        return f"ranks {words}" if len(words) <= 7 else f"{len(self.ranks)} ranks"


class Timeline:
    """The last iterations of a panel, at least two where the last one begins before the one before it has ended."""

    def __init__(self, records: Sequence[Mapping[str, object]], num_iterations: int):
        self.overlaps = _overlap([span for lane in lanes(records) for span in lane.spans])
        self.lanes = last_iterations(lanes(records), max(num_iterations, 1 + self.overlaps))
        self.spans = [span for lane in self.lanes for span in lane.spans]
        self.start_s = min((span.start_s for span in self.spans), default=0.0)
        self.end_s = max((span.end_s for span in self.spans), default=1.0)
        self.seconds = self.end_s - self.start_s
        self.starts: dict[int, float] = {}  # iteration, from 1 -> when its first rank began it
        self.drawn: dict[int, object] = {}  # iteration -> that which is drawn meanwhile, from 0, if it is another one
        for span in sorted(self.spans, key=lambda span: span.start_s):
            if span.iteration is not None:
                self.starts.setdefault(span.iteration + 1, span.start_s)
                if "iteration" in span.args:
                    self.drawn[span.iteration + 1] = span.args["iteration"]

    @property
    def words(self) -> str:
        """Which iterations these are, how long they took, and how busy the ranks were."""
        numbers = ""
        if self.starts:
            first, last = min(self.starts), max(self.starts)
            numbers = f"iteration {first}: " if first == last else f"iterations {first} to {last}: "
        busy = [self.busy(lane.spans) for lane in self.lanes]
        return f"{numbers}{self.seconds:.3g} s" + (f", ranks busy {mean(busy):.0%}" if busy else "")

    @property
    def marks(self) -> dict[str, float]:
        """Labels of iterations, and when they start."""
        drawn = {number: f", sampling {int(str(drawn)) + 1}" for number, drawn in self.drawn.items()}
        return {f"iteration {number}{drawn.get(number, '')}": start_s for number, start_s in self.starts.items()}

    def busy(self, spans: Sequence[Span]) -> float:
        return busy_fraction(spans, self.start_s, self.end_s)


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
    timeline = Timeline(records, num_iterations)
    picture = Picture()
    picture.title(title, timeline.words)
    stack = _Stack([timeline], styles_of(workflow), most_lanes, LANE_INCH[1])

    def part(area: Area) -> None:
        axes = stack.draw(area, 0, top=0.24)
        for words, x in timeline.marks.items():
            axes.axvline(x, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=7, clip_on=False)
            axes.annotate(words, (x, -0.5), (2, 2), annotation_clip=False, **ABOVE)

    picture.add(0.24 + stack.inches(0), part)
    since = f"seconds since the start of iteration {min(timeline.starts)}" if timeline.starts else "seconds"
    stack.add_axis(picture, since)
    picture.save(path)


def add_stack(
    picture: Picture, panels: Sequence[Panel], *, styles: Mapping[str, Style], most_lanes: int | None = None
) -> None:
    """Draws timelines below each other on one axis of seconds, of one iteration each (of two that overlap), and the
    legend.

    styles: of calls by their names, as styles_of returns them.
    most_lanes: of the whole stack; if there are more ranks, those of a timeline that do the same share a lane.
    """
    timelines = [Timeline(panel.records, 1) for panel in panels]
    stack = _Stack(timelines, styles, most_lanes, STACK_INCH)
    beside = LEFT + CHARACTER * TEXT * 1.2 * (max(len(panel.title) for panel in panels) + 1)
    for number, panel in enumerate(panels):

        def part(area: Area, number=number, panel=panel) -> None:
            area.text(LEFT, 0.17, panel.title, fontweight="bold")
            words = ", ".join(filter(None, (timelines[number].words, panel.note)))
            area.text(beside, 0.17, words, colour=FAINT_INK)
            stack.draw(area, number, top=0.29)

        picture.add(0.29 + stack.inches(number), part)
    stack.add_axis(picture, "seconds since the start of the iteration")


def last_iterations(all_lanes: Sequence[Lane], num_iterations: int) -> list[Lane]:
    """Returns the lanes cut to the last iterations; spans without an iteration stay if they fall between them. The last
    step of a run that samples ahead samples nothing, and is not shown unless it is the only one."""
    spans = [span for lane in all_lanes for span in lane.spans if span.iteration is not None]
    known = sorted({span.iteration for span in spans if span.iteration is not None})
    if not known:
        return list(all_lanes)
    ahead = {span.iteration for span in spans if "iteration" in span.args}
    if ahead and known[-1] not in ahead and len(known) > 1:
        known.pop()
    wanted = set(known[-num_iterations:])
    first_s = min(span.start_s for span in spans if span.iteration in wanted)
    last_s = max(span.end_s for span in spans if span.iteration in wanted)

    def is_shown(span: Span) -> bool:
        if span.iteration is None:
            return first_s <= span.start_s and span.end_s <= last_s
        return span.iteration in wanted

    return [Lane(lane.rank, lane.host, tuple(filter(is_shown, lane.spans))) for lane in all_lanes]


def _overlap(spans: Sequence[Span]) -> bool:
    """Returns whether the last iteration begins well before the one before it has ended."""
    numbers = sorted({span.iteration for span in spans if span.iteration is not None})[-2:]
    if len(numbers) < 2:
        return False
    before, last = ([span for span in spans if span.iteration == number] for number in numbers)
    both_s = max(span.end_s for span in (*before, *last)) - min(span.start_s for span in (*before, *last))
    return max(span.end_s for span in before) - min(span.start_s for span in last) > ALIKE * both_s


def _joined(spans: Sequence[Span], style_of: Callable[[Span], Style], gap_s: float) -> list[Run]:
    """Joins neighbours of the same style, such as mini-batches, that are not farther apart."""
    runs: list[Run] = []
    for span in spans:
        style = style_of(span)
        if runs and runs[-1][0] == style and span.start_s - runs[-1][2] < gap_s:
            runs[-1] = style, runs[-1][1], max(runs[-1][2], span.end_s)
        else:
            runs.append((style, span.start_s, span.end_s))
    return runs


class _Stack:
    """Draws timelines below each other on one axis of seconds."""

    def __init__(
        self,
        timelines: Sequence[Timeline],
        styles: Mapping[str, Style],
        most_lanes: int | None,
        largest_inch: float,
    ):
        self.timelines, self.styles = timelines, styles
        self.width_s = max(timeline.seconds for timeline in timelines)
        num_lanes = sum(len(timeline.lanes) for timeline in timelines)
        together = most_lanes is not None and num_lanes > most_lanes
        self.rows = [self._rows(timeline.lanes, together) for timeline in timelines]
        self.lane_inch = min(largest_inch, max(LANE_INCH[0], ALL_LANES_INCH / max(1, sum(map(len, self.rows)))))

    def style_of(self, span: Span) -> Style:
        return SPANS.get(span.category) or self.styles.get(span.name) or palette.other(span.name)

    def _rows(self, shown: Sequence[Lane], together: bool) -> list[Row]:
        """Returns a row for each lane, or for all lanes that do the same at the same time."""
        most_s = ALIKE * self.width_s
        rows: list[tuple[list[Run], Row]] = []
        for lane in shown:
            runs = [run for run in self._all_joined(lane.spans) if run[2] - run[1] > most_s]
            alike = [row for others, row in rows if together and _are_alike(runs, others, most_s)]
            if alike:
                alike[0].ranks.append(lane.rank)
            else:
                rows.append((runs, Row([lane.rank], "" if together else lane.host, lane.spans)))
        return [row for _, row in rows]

    def _all_joined(self, spans: Sequence[Span]) -> list[Run]:
        return _joined(spans, self.style_of, JOINED * self.width_s)

    def inches(self, number: int) -> float:
        """Returns the height of the lanes of a timeline."""
        return self.lane_inch * max(1, len(self.rows[number]))

    def add_axis(self, picture: Picture, label: str) -> None:
        """Draws the axis of seconds below all lanes, and the legend: calls in their order, other computation, the
        rest."""

        def part(area: Area) -> None:
            axes = area.axes(LEFT, 0.03, WIDTH - LEFT - RIGHT, 0.001)
            axes.set_xlim(0, self.width_s)
            axes.set_yticks([])
            axes.spines[["top", "left", "right"]].set_visible(False)
            axes.spines["bottom"].set_color(palette.RULE)
            axes.tick_params(length=3, labelsize=SMALL, color=FAINT_INK, labelcolor=INK)
            axes.set_xlabel(label, fontsize=TEXT, color=INK)

        picture.add(0.5, part)
        used = {self.style_of(span) for timeline in self.timelines for span in timeline.spans}
        calls = [style for style in dict.fromkeys(self.styles.values()) if style in used]
        rest = [style for style in SPANS.values() if style in used]
        picture.legend([*calls, *sorted(used.difference(calls, rest)), *rest, palette.IDLE_STYLE])

    def draw(self, area: Area, number: int, top: float) -> Axes:
        """Draws the lanes of a timeline, with its busy share beside each."""
        rows, timeline = self.rows[number], self.timelines[number]
        axes = area.axes(LEFT, top, WIDTH - LEFT - RIGHT, self.inches(number))
        axes.set_xlim(timeline.start_s, timeline.start_s + self.width_s)
        axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
        idle = [(timeline.start_s, timeline.seconds)]
        for row, lane in enumerate(rows):
            axes.broken_barh(idle, (row - 0.42, 0.84), facecolor=palette.IDLE, linewidth=0, zorder=1)
            self._draw_spans(axes, row, lane.spans)
            if self.lane_inch >= LABELLED_INCH:
                for iteration in {span.iteration for span in lane.spans}:
                    named = f" {iteration + 1}" if timeline.overlaps and iteration is not None else ""
                    spans = [span for span in lane.spans if span.iteration == iteration]
                    self._write_words(axes, row, spans, named)
            if row and lane.host != rows[row - 1].host:  # another node starts here
                axes.axhline(row - 0.5, color=FAINT_INK, linewidth=0.8, zorder=7)
        step = max(1, ceil(LABELLED_INCH / self.lane_inch))
        axes.set_yticks(range(0, len(rows), step), [row.label for row in rows[::step]])
        axes.tick_params(length=0, labelsize=SMALL, labelcolor=INK)
        beside: dict[str, Any] = {"textcoords": "offset points", "annotation_clip": False, "color": FAINT_INK}
        for row in range(0, len(rows), step):
            share = f"{timeline.busy(rows[row].spans):.0%}" + " busy" * (row == 0)
            axes.annotate(share, (timeline.end_s, row), (5, 0), va="center", fontsize=SMALL, **beside)
        return axes

    def _draw_spans(self, axes: Axes, row: int, spans: Sequence[Span]) -> None:
        """Draws bars. A white edge separates neighbours, but would cover a span of a pixel or two."""
        limit_s = NARROW * self.width_s
        wide = [span for span in spans if span.end_s - span.start_s > limit_s]
        narrow = self._all_joined([span for span in spans if span.end_s - span.start_s <= limit_s])
        bars: dict[tuple[Style, float], list[tuple[float, float]]] = {}
        for style, start_s, end_s in narrow:
            bars.setdefault((style, 0.0), []).append((start_s, end_s - start_s))
        for span in wide:
            bars.setdefault((self.style_of(span), 0.6), []).append((span.start_s, span.end_s - span.start_s))
        for (style, edge), ranges in bars.items():
            bottom, height, layer = row - 0.42, 0.84, 3
            if style == TRANSFER:  # may run beside a call
                bottom, height, layer = row + 0.24, 0.18, 5
            elif style in SPANS.values():
                edge, layer = 0.0, 4
            bars_of_style = axes.broken_barh(ranges, (bottom, height), zorder=layer, linewidth=edge)
            bars_of_style.set(facecolor=style.colour, edgecolor=style.edge, hatch=style.hatch)

    def _write_words(self, axes: Axes, row: int, spans: Sequence[Span], more: str) -> None:
        """Writes the names of calls into them, and `more`, on two lines if one is too long; joined neighbours share
        one."""
        for style, start_s, end_s in self._all_joined([span for span in spans if span.category not in SPANS]):
            room = (end_s - start_s) / self.width_s * (WIDTH - LEFT - RIGHT) / (CHARACTER * SMALL) - 1.5  # characters
            label = style.label + more
            if len(label) > room and self.lane_inch >= TWO_LINES_INCH:
                label = label.replace(" ", "\n", 1)
            if max(map(len, label.split("\n"))) <= room:
                axes.text(
                    (start_s + end_s) / 2, row, label, ha="center", va="center", fontsize=SMALL, linespacing=0.95,
                    zorder=6, clip_on=True, color=style.ink,
                    bbox={"facecolor": style.colour, "edgecolor": "none", "pad": 1.0},
                )  # fmt: skip


def _are_alike(runs: Sequence[Run], others: Sequence[Run], most_s: float) -> bool:
    """Returns whether two lanes show the same styles at the same times."""
    if [style for style, *_ in runs] != [style for style, *_ in others]:
        return False
    pairs = zip(runs, others, strict=True)
    return all(abs(a[1] - b[1]) <= most_s and abs(a[2] - b[2]) <= most_s for a, b in pairs)
