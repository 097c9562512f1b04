"""Pictures of the scan, one per question; each says in its title what is asked and marks what does not fit."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench.rows import RESULTS
from rlhf_spmd.plan.cluster import DEVICE_BYTES

COLOURS = {
    "flattening": "#8a919e",
    "interleaving1": "#7fb3e0",
    "interleaving2": "#2f6fb0",
    "separation": "#d9822b",
    "reallocation": "#4c9a5f",
    "planner": "#1d2129",
}
PHASE_COLOURS = {"generation": "#2f6fb0", "inference": "#9cc6ea", "training": "#d9822b", "rest": "#e6e8ec"}
FAINT = "#8a919e"
Panel = Callable[[Axes, Sequence[Mapping]], None]


def draw(rows: Sequence[Mapping], folder: Path = RESULTS) -> list[Path]:
    """All pictures of a scan's rows, as folder/scan_*.png."""
    pictures = {
        "throughput": ("Which strategy is fastest? Samples per second, forecast", _throughput),
        "speed_up": ("What is gained over flattening? Times as many samples per second", _speed_up),
        "phases": (
            "Where does an iteration go? Seconds, mean over devices (rest: they wait; letters: strategies)",
            _phases,
        ),
        "memory": ("What does the fullest device hold? GiB at the peak", _memory),
    }
    return [_draw(folder / f"scan_{name}.png", title, rows, panel) for name, (title, panel) in pictures.items()]


def curves(rows: Sequence[Mapping], path: Path) -> Path:
    """Reward and KL of each row's run over its iterations, on top of each other: earlier ones are drawn wider."""
    figure = _figure("Does the placement change what is learned? The embedded model, float32", 11, 4.4)
    for index, (key, name) in enumerate((("rewards", "mean reward"), ("kls", "KL to the reference, nats"))):
        axes = figure.add_axes((0.07 + 0.49 * index, 0.22, 0.42, 0.62))
        for order, row in enumerate(rows):
            width = 1.2 + 1.6 * (len(rows) - 1 - order)
            colour = COLOURS.get(row["strategy"], FAINT)
            axes.plot(range(1, len(row[key]) + 1), row[key], color=colour, lw=width, label=row["strategy"])
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_xlabel("iteration", fontsize=9)
        _plain(axes)
    _legend(figure, [row["strategy"] for row in rows], COLOURS)
    figure.savefig(path)
    return path


def _draw(path: Path, title: str, rows: Sequence[Mapping], panel: Panel) -> Path:
    """A panel per model."""
    presets = list(dict.fromkeys(row["preset"] for row in rows))
    across = min(2, len(presets))
    down = -(-len(presets) // across)
    height = 1.1 + 3.1 * down
    figure = _figure(title, 12, height)
    for index, preset in enumerate(presets):
        axes = figure.add_subplot(down, across, index + 1)
        axes.set_title(preset, fontsize=10, loc="left", fontweight="bold")
        panel(axes, [row for row in rows if row["preset"] == preset])
        _plain(axes)
    phases = panel is _phases
    found = list(dict.fromkeys(row["strategy"] for row in rows))
    _legend(figure, list(PHASE_COLOURS) if phases else found, PHASE_COLOURS if phases else COLOURS)
    figure.subplots_adjust(left=0.07, right=0.98, top=1 - 0.8 / height, bottom=0.9 / height, hspace=0.38, wspace=0.16)
    figure.savefig(path)
    return path


def _figure(title: str, width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.03, 1 - 0.3 / height, title, fontsize=13, fontweight="bold", va="center")
    return figure


def _legend(figure: Figure, names: Sequence[str], colours: Mapping[str, str]) -> None:
    handles = [Patch(color=colours.get(name, FAINT), label=name) for name in names]
    figure.legend(handles=handles, loc="lower center", ncols=len(names), frameon=False, fontsize=9)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _bars(axes: Axes, rows: Sequence[Mapping], height_of: Callable[[Mapping], float | None]) -> None:
    """Groups of bars, one per layout; a cross where there is nothing to draw."""
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    width = 0.84 / len(strategies)
    for row in rows:
        at = layouts.index(row["layout"]) - 0.42 + (strategies.index(row["strategy"]) + 0.5) * width
        height = height_of(row)
        if height is None:
            axes.text(at, 0, "×", ha="center", va="bottom", fontsize=9, color=COLOURS.get(row["strategy"], FAINT))
        else:
            axes.bar(at, height, width * 0.92, color=COLOURS.get(row["strategy"], FAINT))
    axes.set_xticks(range(len(layouts)), layouts)
    axes.set_xlim(-0.6, len(layouts) - 0.4)
    axes.set_ylim(bottom=0)
    if any(height_of(row) is None for row in rows):
        axes.text(0.01, 0.97, "×: does not fit", transform=axes.transAxes, fontsize=8, color=FAINT, va="top")


def _throughput(axes: Axes, rows: Sequence[Mapping]) -> None:
    _bars(axes, rows, lambda row: row["samples_per_s"])


def _memory(axes: Axes, rows: Sequence[Mapping]) -> None:
    _bars(axes, rows, lambda row: row["peak_bytes"] / 2**30 if row["samples_per_s"] else None)
    limit = DEVICE_BYTES["a100-80g"] / 2**30
    axes.axhline(limit, color="#b03030", lw=1, ls="--")
    axes.set_ylim(0, 1.12 * limit)


def _speed_up(axes: Axes, rows: Sequence[Mapping]) -> None:
    """Lines over layouts; where flattening does not fit there is nothing to compare with."""
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    if not any(row["speed_up"] for row in rows):
        axes.text(0.5, 0.5, "flattening fits no layout", transform=axes.transAxes, ha="center", color=FAINT)
        axes.set_axis_off()
        return
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        points = [
            (layouts.index(r["layout"]), r["speed_up"]) for r in rows if r["strategy"] == strategy and r["speed_up"]
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", ms=4, lw=1.6, color=COLOURS.get(strategy, FAINT))
    axes.axhline(1, color=FAINT, lw=0.8, ls=":")
    axes.set_xticks(range(len(layouts)), layouts)
    axes.set_xlim(-0.4, len(layouts) - 0.6)


def _phases(axes: Axes, rows: Sequence[Mapping]) -> None:
    """Stacked bars, a group per layout; strategies in the order of COLOURS, by their first letters."""
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    width, most = 0.84 / len(strategies), max((row["iteration_s"] or 0.0 for row in rows), default=0.0)
    for row in rows:
        at = layouts.index(row["layout"]) - 0.42 + (strategies.index(row["strategy"]) + 0.5) * width
        below = 0.0
        for phase, colour in PHASE_COLOURS.items() if row["iteration_s"] else ():
            axes.bar(at, row["device_s"][phase], width * 0.92, bottom=below, color=colour)
            below += row["device_s"][phase]
        name = row["strategy"][0] + (row["strategy"][-1] if row["strategy"][-1].isdigit() else "")
        axes.text(at, below + 0.01 * most, name if below else "×", ha="center", va="bottom", fontsize=7, color=FAINT)
    axes.set_ylim(0, 1.12 * most or 1.0)
    axes.set_xticks(range(len(layouts)), layouts)
    axes.set_xlim(-0.6, len(layouts) - 0.4)
