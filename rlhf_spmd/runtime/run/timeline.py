"""The timeline as a picture: one lane per rank, a colour per model, a shade per kind of call, gaps where a rank idles.

It is the quickest way to see what a strategy does: which calls run at the same time, what waits for what, and how much
of the machine is used. Measured runs and forecasts are drawn by the same function.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlhf_spmd.runtime.observe.trace import Lane, Span, busy_fraction, lanes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

MODEL_COLOURS = {"actor": "#2f6db3", "critic": "#e0812f", "reference": "#3f9b6c", "reward": "#8d5ab5"}
OTHER_COLOUR = "#737b87"  # computation without a model, e.g. advantages
LANE_COLOUR = "#f1f2f5"  # what shows where nothing runs
INK, FAINT_INK = "#22262e", "#69707c"
KINDS = ("generate", "infer", "train", "")  # order in the legend
LABELLED_RANKS = 16  # up to so many lanes are tall enough for words
INCH_PER_RANK = (0.13, 0.52)  # smallest and largest height of a lane


class Style(NamedTuple):
    """How the spans of one call look; also one entry of the legend."""

    label: str
    colour: str
    hatch: str = ""
    edge: str = "white"
    top: float = -0.40  # in lanes, from the middle of the lane, downwards
    height: float = 0.80
    layer: int = 3
    words: tuple[str, ...] = ()  # written into the span where there is room: the first that fits


def write_png(
    path: str | Path,
    records: Sequence[Mapping[str, object]],
    *,
    title: str,
    iterations: str | Iterable[int] = "last",
    num_iterations: int = 2,
    width_s: float | None = None,
    dpi: int = 150,
) -> None:
    """Draws what every rank's `Tracer.to_records` gave. `iterations`: "first", "last" (so many), or their numbers.

    width_s: seconds that the picture spans, so that several can be compared; None: what is there.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = _choose(lanes(records), iterations, num_iterations)
    spans = [span for lane in shown for span in lane.spans]
    start_s = min((span.start_s for span in spans), default=0.0)
    end_s = max((span.end_s for span in spans), default=1.0)
    smallest, largest = INCH_PER_RANK
    lanes_inch = max(1.1, len(shown) * min(largest, max(smallest, 6.0 / max(1, len(shown)))))
    styles = _styles(spans)
    columns = 6
    legend_rows = -(-(len(styles) + 1) // columns)
    top_inch, bottom_inch = 0.95, 0.62 + 0.24 * legend_rows
    height = lanes_inch + top_inch + bottom_inch
    figure = Figure(figsize=(12, height), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.075, bottom_inch / height, 0.865, lanes_inch / height))
    _draw_lanes(axes, shown, styles, start_s, end_s)
    first = _draw_iterations(axes, spans, start_s, len(shown))
    _finish_axes(axes, shown, width_s or end_s - start_s, first)
    busy = [busy_fraction(lane.spans, start_s, end_s) for lane in shown]
    _write_busy(axes, busy)
    mean = f", ranks busy {100 * sum(busy) / len(busy):.0f} % of it" if busy else ""
    figure.text(0.075, 1 - 0.33 / height, title, fontsize=13, fontweight="bold", color=INK, va="center")
    subtitle = f"{_iterations_text(spans)}{end_s - start_s:.2f} s{mean}"
    figure.text(0.075, 1 - 0.58 / height, subtitle, fontsize=9.5, color=FAINT_INK, va="center")
    figure.legend(
        handles=_legend(styles), loc="lower left", bbox_to_anchor=(0.068, 0.04 / height), ncols=columns, frameon=False,
        fontsize=9, handlelength=1.7, handleheight=1.05, columnspacing=1.6, labelcolor=INK,
    )  # fmt: skip
    figure.savefig(path)


def style_of(span: Span) -> Style:
    """Colour by model, shade by kind; both are read from the call's name, or from the span's args `model`, `kind`."""
    if span.category == "transfer":
        return Style("transfer", "#1d2129", top=0.24, height=0.16, layer=5)
    if span.category == "wait":
        return Style("waiting", "#fbfbfc", hatch="////", edge="#c3c7cf", layer=4)
    if span.category == "control":
        return Style("agreeing (control messages)", "#aeb4be", layer=4)
    words = re.split(r"[^a-z]+", span.name.lower())
    model = span.args.get("model") or next((word for word in words if word in MODEL_COLOURS), "")
    kind = span.args.get("kind") or next((word for word in words if word in KINDS and word), "")
    colour = MODEL_COLOURS.get(model, OTHER_COLOUR)
    label = f"{model} {kind}".strip() if model in MODEL_COLOURS else span.name.replace("_", " ")
    if kind == "infer":
        return Style(label, _mix(colour, "#ffffff", 0.48), words=(label, kind))
    if kind == "train":
        return Style(
            label, _mix(colour, "#000000", 0.22), hatch="////", edge=_mix(colour, "#ffffff", 0.25), words=(label, kind)
        )
    return Style(label, colour, words=(label, kind or label))


def _mix(colour: str, other: str, share: float) -> str:
    pairs = [(int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def _choose(all_lanes: Sequence[Lane], iterations: str | Iterable[int], num_iterations: int) -> list[Lane]:
    """The lanes cut down to some iterations; spans without an iteration stay if they fall between them."""
    known = sorted({span.iteration for lane in all_lanes for span in lane.spans if span.iteration is not None})
    if not known:
        return list(all_lanes)
    if isinstance(iterations, str):
        assert iterations in ("first", "last") and num_iterations > 0, (iterations, num_iterations)
        wanted = set(known[:num_iterations] if iterations == "first" else known[-num_iterations:])
    else:
        wanted = set(iterations)
    times = [s for lane in all_lanes for span in lane.spans if span.iteration in wanted for s in span[2:4]]
    low, high = (min(times), max(times)) if times else (0.0, 0.0)

    def belongs(span: Span) -> bool:
        return span.iteration in wanted or (span.iteration is None and low <= span.start_s and span.end_s <= high)

    return [Lane(lane.rank, lane.host, tuple(filter(belongs, lane.spans))) for lane in all_lanes]


def _styles(spans: Iterable[Span]) -> list[Style]:
    """Every style that occurs, in the legend's order: models, then other computation, then what is not computation."""
    models = list(MODEL_COLOURS)

    def place(style: Style) -> tuple:
        model, _, kind = style.label.partition(" ")
        if style.words and model in models:
            return (0, models.index(model), KINDS.index(kind) if kind in KINDS else len(KINDS), style.label)
        return (1 if style.words else 2, 0, 0, style.label)

    return sorted({style_of(span) for span in spans}, key=place)


def _draw_lanes(axes: Axes, shown: Sequence[Lane], styles: Sequence[Style], start_s: float, end_s: float) -> None:
    width = end_s - start_s
    for row, lane in enumerate(shown):
        axes.broken_barh([(0, width)], (row - 0.40, 0.80), facecolor=LANE_COLOUR, linewidth=0, zorder=1)
        by_style: dict[Style, list[Span]] = {style: [] for style in styles}
        for span in lane.spans:
            by_style[style_of(span)].append(span)
        for style, spans in by_style.items():
            # A white edge tells neighbours apart, but would swallow a span of a pixel or two.
            for wide in (False, True):
                bars = [
                    (span.start_s - start_s, span.end_s - span.start_s)
                    for span in spans
                    if (span.end_s - span.start_s > 0.006 * width) == wide
                ]
                hatch = {"hatch": style.hatch, "edgecolor": style.edge} if style.hatch and wide else {}
                axes.broken_barh(
                    bars,
                    (row + style.top, style.height),
                    facecolor=style.colour,
                    linewidth=0,
                    zorder=style.layer,
                    **hatch,
                )
                if wide and style.layer == 3:
                    axes.broken_barh(
                        bars,
                        (row + style.top, style.height),
                        facecolor="none",
                        edgecolor="white",
                        linewidth=0.8,
                        zorder=3.5,
                    )
            if style.words and len(shown) <= LABELLED_RANKS:
                _write_words(axes, row, style, spans, start_s, width)


def _write_words(axes: Axes, row: int, style: Style, spans: Sequence[Span], start_s: float, width: float) -> None:
    """Writes what a span is into it; neighbours of one style (mini-batches) share a word."""
    runs: list[list[float]] = []
    for span in spans:
        if runs and span.start_s - runs[-1][1] < 0.001 * width:
            runs[-1][1] = max(runs[-1][1], span.end_s)
        else:
            runs.append([span.start_s, span.end_s])
    light = "infer" in style.label
    for start, end in runs:
        room = (end - start) / width / 0.0066 - 1.2  # characters
        word = next((word for word in style.words if len(word) <= room), None)
        if word is None:
            continue
        axes.text(
            (start + end) / 2 - start_s, row, word, ha="center", va="center", fontsize=8.5, zorder=6, clip_on=True,
            color=INK if light else "white",
            bbox={"facecolor": style.colour, "edgecolor": "none", "pad": 1.2},
        )  # fmt: skip


def _draw_iterations(axes: Axes, spans: Iterable[Span], start_s: float, num_lanes: int) -> int | None:
    """Marks where each iteration starts (on the first rank to start it); returns the first one's number."""
    starts: dict[int, float] = {}
    for span in spans:
        if span.iteration is not None:
            starts[span.iteration] = min(span.start_s, starts.get(span.iteration, span.start_s))
    for number, moment in sorted(starts.items()):
        x = moment - start_s
        axes.plot([x, x], [-0.62, num_lanes - 0.5], color=FAINT_INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=7)
        axes.annotate(
            f"iteration {number}", (x, -0.62), (3, 1), textcoords="offset points", fontsize=8.5, color=FAINT_INK,
            va="bottom", annotation_clip=False,
        )  # fmt: skip
    return min(starts, default=None)


def _finish_axes(axes: Axes, shown: Sequence[Lane], width: float, first: int | None) -> None:
    axes.set_xlim(0, width)
    axes.set_ylim(max(1, len(shown)) - 0.5, -0.62)
    step = -(-len(shown) // 32) if shown else 1
    axes.set_yticks(range(0, len(shown), step), [lane.label for lane in shown[::step]])
    axes.tick_params(length=0, labelsize=9 if len(shown) <= LABELLED_RANKS else 7.5, labelcolor=INK)
    axes.tick_params(axis="x", length=3, labelsize=9, color=FAINT_INK)
    axes.grid(axis="x", color="white", linewidth=0.8, zorder=2)
    axes.set_axisbelow(False)
    axes.set_xlabel(
        "seconds" if first is None else f"seconds since the start of iteration {first}", fontsize=9.5, color=INK
    )
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(FAINT_INK)
    for row in range(1, len(shown)):
        if shown[row].host != shown[row - 1].host:  # another node starts here
            axes.axhline(row - 0.5, color=FAINT_INK, linewidth=0.8, zorder=7)


def _write_busy(axes: Axes, busy: Sequence[float]) -> None:
    place = axes.get_yaxis_transform()
    step = -(-len(busy) // 32) if busy else 1
    size = 9 if len(busy) <= LABELLED_RANKS else 7.5
    for row in range(0, len(busy), step):
        axes.text(1.008, row, f"{100 * busy[row]:.0f} %", transform=place, fontsize=size, color=FAINT_INK, va="center")
    axes.annotate(
        "busy", (1.008, -0.62), (0, 1), xycoords=place, textcoords="offset points", fontsize=8.5, color=FAINT_INK,
        va="bottom", annotation_clip=False,
    )  # fmt: skip


def _iterations_text(spans: Iterable[Span]) -> str:
    numbers = sorted({span.iteration for span in spans if span.iteration is not None})
    if not numbers:
        return ""
    if len(numbers) == 1:
        return f"iteration {numbers[0]}: "
    return f"iterations {numbers[0]} to {numbers[-1]}: "


def _legend(styles: Sequence[Style]) -> list[Patch]:
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=style.colour, hatch=style.hatch, edgecolor=style.edge, linewidth=0, label=style.label)
        for style in styles
    ]
    return [*patches, Patch(facecolor=LANE_COLOUR, edgecolor="#d5d8de", linewidth=0.6, label="idle")]
