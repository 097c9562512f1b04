"""Pictures about the planner: its methods from 8 to 1,024 devices, and the timeline of a case in which separation stays
behind. Drawn from committed rows by `python -m tools pictures`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.runtime.pictures.palette import RULE, SYSTEMS, Style
from rlhf_spmd.runtime.pictures.picture import Area, Picture
from rlhf_spmd.verbs.draw import picture_of
from tools.pictures.plots import plain

BEHIND = "llama-33b", "8x8", ("separation", "flattening")  # the case, and the strategies that are drawn
MARKERS = "os^D"
LEFT, STEP, INCHES = 0.75, 4.05, (3.3, 2.1)  # of two panels side by side


def methods(rows: Sequence[Mapping], path: Path) -> Path:
    """Draws the seconds of each method's search and its distance from the optimum over devices; below, distance over
    seconds."""
    names = list(dict.fromkeys(row["method"] for row in rows))
    colours = dict(zip(names, SYSTEMS, strict=True))
    picture = Picture()
    picture.title(
        "How long do the planner's methods take, and how far from the optimum do they end?",
        "Seconds of a processor, measured; distances by the call-level model of calibration a100-80g.",
    )

    def over_devices(area: Area) -> None:
        seconds, far = (area.axes(LEFT + at * STEP, 0.3, *INCHES) for at in (0, 1))
        area.text(LEFT, 0.14, "seconds of the search", fontweight="bold")
        area.text(LEFT + STEP, 0.14, "distance from the optimum", fontweight="bold")
        for name, marker in zip(names, MARKERS, strict=True):
            mine = [row for row in rows if row["method"] == name]
            looks = {"color": colours[name], "marker": marker, "ms": 4, "lw": 1.4}
            seconds.plot([row["devices"] for row in mine], [row["processor_s"] for row in mine], **looks)
            found = [row for row in mine if row["distance"] is not None]
            far.plot([row["devices"] for row in found], [100 * row["distance"] for row in found], **looks)
        for axes, words in ((seconds, "seconds"), (far, "percent")):
            plain(axes, xlabel="devices", ylabel=words)
            axes.set_xscale("log", base=2)
            _ticks(axes, sorted({row["devices"] for row in rows}))
            axes.grid(axis="y", color=RULE, lw=0.5)
        seconds.set_yscale("log")
        far.set_yscale("symlog", linthresh=1)  # linear up to one percent
        far.set_ylim(-0.1, 100)
        far.yaxis.set_major_locator(FixedLocator((0, 0.5, 1, 2, 5, 10, 20, 50, 100)))
        far.yaxis.set_minor_locator(NullLocator())
        far.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        _log_ticks(seconds.yaxis)

    picture.add(3.0, over_devices)
    traced = [row for row in rows if row.get("steps")]
    where = f"{traced[0]['preset']} on {traced[0]['layout']}"

    def over_time(area: Area) -> None:
        axes = area.axes(LEFT, 0.3, STEP + INCHES[0], INCHES[1])
        area.text(LEFT, 0.14, f"best so far while searching, {where}", fontweight="bold")
        least_s = min(row["call_level_s"] for row in traced)
        for row in traced:
            times, far = zip(*row["steps"], strict=True)
            far = [100 * (seconds / least_s - 1) for seconds in far]
            axes.plot(
                [*times, row["processor_s"]], [*far, far[-1]], color=colours[row["method"]], drawstyle="steps-post"
            )
        plain(axes, xlabel="seconds of a processor since the start", ylabel="percent above the optimum")
        axes.set(xscale="log", ylim=(-1, 60))
        _log_ticks(axes.xaxis)
        axes.grid(axis="y", color=RULE, lw=0.5)

    picture.add(3.0, over_time)
    picture.legend([Style(name, colours[name]) for name in names])
    picture.save(path)
    return path


def _log_ticks(axis: Axis) -> None:
    """Labels an axis at 1, 2 and 5 times the powers of ten: an axis of two decades has more than two."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _ticks(axes: Axes, devices: Sequence[int]) -> None:
    axes.xaxis.set_major_locator(FixedLocator(devices))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())


def behind(rows: Sequence[Mapping], path: Path) -> Path:
    """Draws the timelines of separation and of a faster strategy, with the options that the rows of the scan have."""
    preset, layout, strategies = BEHIND
    workload, calibration = make_workload(load(preset)), load_calibration("a100-80g")
    programs = {}
    for row in rows:
        if (row["preset"], row["layout"]) == (preset, layout) and row["strategy"] in strategies:
            options = {name: tuple(one) if isinstance(one, list) else one for name, one in row["options"].items()}
            cluster = Cluster.parse(layout, calibration.name)
            programs[row["strategy"]] = load_strategy(row["strategy"]).compile(workload, cluster, options)
    programs = {name: programs[name] for name in strategies}
    forecasts = {name: forecast(program, calibration) for name, program in programs.items()}
    title = f"Why separation stays behind: {preset} on {layout}"
    picture_of(programs, forecasts, title=title, maps=False, by=f"forecast by calibration {calibration.name}").save(
        path
    )
    return path
