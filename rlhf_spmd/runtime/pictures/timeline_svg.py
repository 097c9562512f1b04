"""The last iteration of some runs as an SVG picture inside a page: a lane for each rank, all on one axis of seconds."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rlhf_spmd.runtime.pictures.axis_ticks import ticks_around
from rlhf_spmd.runtime.pictures.curves_svg import (
    EDGE,
    LINE,
    legend_marks,
    picture,
    shortened,
    text,
    width_of,
)
from rlhf_spmd.runtime.pictures.palette import (
    CONTROL,
    FAINT_INK,
    IDLE_STYLE,
    INK,
    TRANSFER,
    WAITING,
    Style,
    kind_of_name,
    model_of_name,
    style_of_span,
)
from rlhf_spmd.runtime.pictures.timeline import ends_of, last_iterations
from rlhf_spmd.runtime.world.trace import Lane, Span, busy_fraction, lanes

WIDTH, LANE = 970, 14  # of a picture, and from one lane to the next, in pixels
MOST_LANES = 32  # of a run
JOINED = 1 / WIDTH  # of the axis: spans of one style that are not farther apart are one


class Iteration(NamedTuple):
    """The last iteration of a run."""

    title: str
    lanes: Sequence[Lane]

    @property
    def seconds(self) -> float:
        start_s, end_s = ends_of(self.lanes)
        return end_s - start_s


def last_iteration(name: str, records: Sequence[Mapping[str, object]]) -> Iteration | None:
    """Returns the last iteration of a run, from the records of its trace; None if they have no span."""
    found = last_iterations(lanes(records), 1)
    spans = [span for lane in found for span in lane.spans]
    numbers = [span.iteration for span in spans if span.iteration is not None]
    if not spans or ends_of(found)[0] >= ends_of(found)[1]:
        return None
    shown = f", {MOST_LANES} of {len(found)} ranks" if len(found) > MOST_LANES else ""
    words = f"iteration {max(numbers) + 1}, " if numbers else ""
    start_s, end_s = ends_of(found)
    busy = sum(busy_fraction(lane.spans, start_s, end_s) for lane in found) / len(found)
    return Iteration(f"{name}: {words}{end_s - start_s:.3g} s, ranks busy {busy:.0%}{shown}", found)


def timelines(iterations: Sequence[Iteration]) -> str:
    """Draws timelines of one iteration each, at least one."""
    spans = [span for one in iterations for lane in one.lanes for span in lane.spans]
    models = models_of(spans)
    ticks = ticks_around(0.0, max(one.seconds for one in iterations), most=9)
    shown = [lane for one in iterations for lane in one.lanes[:MOST_LANES]]
    left = 3 * EDGE + max(width_of(f"rank {lane.rank}") for lane in shown)
    right = WIDTH - EDGE - width_of(ticks[-1].label) / 2
    scale = (right - left) / ticks[-1].value
    parts, y, used = [], float(EDGE), dict[Style, None]()
    for one in iterations:
        y += LINE
        parts.append(text(EDGE, y, shortened(one.title, WIDTH - 2 * EDGE), INK))
        y += EDGE
        start_s, end_s = ends_of(one.lanes)
        for lane in one.lanes[:MOST_LANES]:
            parts.append(text(left - EDGE, y + LANE - 4, f"rank {lane.rank}", FAINT_INK, "end"))
            parts.append(_bar(left, y, (end_s - start_s) * scale, IDLE_STYLE))
            for style, first_s, last_s in _joined(lane.spans, models, JOINED * ticks[-1].value):
                parts.append(_bar(left + (first_s - start_s) * scale, y, (last_s - first_s) * scale, style))
                used[style] = None
            y += LANE
        y += EDGE
    for tick in ticks:
        x = left + tick.value * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y + 4:.1f}" stroke="{FAINT_INK}"/>')
        parts.append(text(x, y + LINE, tick.label, FAINT_INK, "middle"))
    parts.append(
        text((left + right) / 2, y + 2 * LINE, "seconds since the start of the iteration", FAINT_INK, "middle")
    )
    legend, y = _legend(used, y + 2 * LINE + EDGE)
    said = "; ".join(one.title for one in iterations)
    return picture(f"timelines: {said}", WIDTH, y + LINE, [*parts, *legend])


def models_of(spans: Iterable[Span]) -> list[str]:
    """Returns the models of calls, in the order in which their first calls begin."""
    calls = [span for span in sorted(spans, key=lambda span: span.start_s) if span.category == "compute"]
    return list(dict.fromkeys(model_of_name(span.name) for span in calls if kind_of_name(span.name)))


def _joined(spans: Sequence[Span], models: Sequence[str], gap_s: float) -> list[tuple[Style, float, float]]:
    """Returns (style, start, end) of spans, in the order in which they are drawn; neighbours of one style are one."""
    layers: dict[Style, list[tuple[Style, float, float]]] = {}
    for span in spans:
        style = style_of_span(span.name, span.category, models)
        runs = layers.setdefault(style, [])
        if runs and span.start_s - runs[-1][2] <= gap_s:
            runs[-1] = style, runs[-1][1], max(runs[-1][2], span.end_s)
        else:
            runs.append((style, span.start_s, span.end_s))
    order = {CONTROL: 1, WAITING: 1, TRANSFER: 2}
    return [run for style in sorted(layers, key=lambda style: order.get(style, 0)) for run in layers[style]]


def _bar(x: float, y: float, width: float, style: Style) -> str:
    """Draws a span. Transfers may run beside a call, so they are low; waiting is white with an edge."""
    top, height = (y + LANE - 5, 3) if style == TRANSFER else (y + 1, LANE - 3)
    edge = f' stroke="{style.edge}" stroke-width="0.5"' if style == WAITING else ""
    place = f'x="{x:.1f}" y="{top:.1f}" width="{max(width, 0.5):.1f}" height="{height}"'
    return f'<rect {place} fill="{style.colour}"{edge}/>'


def _legend(used: Iterable[Style], top: float) -> tuple[list[str], float]:
    """Calls by model and kind, then the rest."""
    rest = [WAITING, CONTROL, TRANSFER]
    known = list(used)
    found = [*sorted(style for style in known if style not in rest), *(style for style in rest if style in known)]
    marks, bottom = legend_marks([style.label for style in (*found, IDLE_STYLE)], top, wide=WIDTH)
    parts = []
    for style, (x, y) in zip((*found, IDLE_STYLE), marks, strict=True):
        edge = f' stroke="{style.edge}"' if style == WAITING else ""
        parts.append(f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="12" height="9" fill="{style.colour}"{edge}/>')
        parts.append(text(x + 18, y, style.label, INK))
    return parts, bottom
