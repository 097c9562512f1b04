"""Pictures of rows, one per question; each says in its title what is asked and in its subtitle what kind of number it
shows. `python -m tools pictures` draws them from bench/results/."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from bench.rows import RESULTS, STRATEGIES, TIMELINES
from rlhf_spmd.command_line.fitting_strategies import compile_all
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.runtime.pictures import palette
from rlhf_spmd.runtime.pictures.palette import (
    FAINT_INK,
    INK,
    NEUTRAL,
    SYSTEMS,
    WAITING,
    Style,
    shade,
)
from rlhf_spmd.runtime.pictures.picture import MARGIN, SMALL, TEXT, WIDTH, Area, Picture
from rlhf_spmd.runtime.pictures.timeline import Panel as Timeline
from rlhf_spmd.runtime.pictures.timeline import add_stack, write_png
from rlhf_spmd.verbs.draw import picture_of

COLOURS = dict(zip(STRATEGIES, cycle(palette.STRATEGIES)))
PHASES = {
    "generation": Style("generation", shade(NEUTRAL, "generate")),
    "inference": Style("inference", shade(NEUTRAL, "infer")),
    "training": Style("training", shade(NEUTRAL, "train")),
    "rest": WAITING._replace(label="waiting"),
}
DRAWN_LAYOUT = {"llama-7b": "1x8", "llama-13b": "2x8", "llama-33b": "4x8", "llama-65b": "8x8"}  # where most fit
FORECAST = "Forecast by calibration a100-80g; nothing has validated its network between nodes."
MARKERS = "os^D"
NAMES = {"planner": "the placement that `plan` finds"}
Panel = Callable[[Axes, Sequence[Mapping]], None]


def plain(axes: Axes, *, xlabel: str = "", ylabel: str = "") -> None:
    """Makes axes without a frame, with labels that can be read."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT_INK)
    axes.tick_params(labelsize=SMALL, color=FAINT_INK, labelcolor=INK)
    axes.set_xlabel(xlabel, fontsize=TEXT, color=INK)
    axes.set_ylabel(ylabel, fontsize=TEXT, color=INK)


def draw(rows: Sequence[Mapping], folder: Path = RESULTS) -> list[Path]:
    """Draws the pictures of a scan's rows, as folder/scan_*.png."""
    found = list(dict.fromkeys(row["strategy"] for row in rows))
    by_strategy = [Style(NAMES.get(name, name), COLOURS.get(name, FAINT_INK)) for name in found]
    some = [row for row in rows if DRAWN_LAYOUT.get(row["preset"], row["layout"]) == row["layout"]]
    throughput = _panels("Which strategy is fastest?", FORECAST, rows, _throughput, by_strategy, height=1.75)
    phases = _panels(
        "Where does the time go?", f"Mean over devices. {FORECAST}", some, _phases, list(PHASES.values()),
        height=1.55, left=1.15,
    )  # fmt: skip
    pictures = {"throughput": throughput, "phases": phases}
    paths = [folder / f"scan_{name}.png" for name in pictures]
    for picture, path in zip(pictures.values(), paths, strict=True):
        picture.save(path)
    return paths


def _panels(
    title: str, subtitle: str, rows: Sequence[Mapping], panel: Panel, legend: Sequence[Style], *, height: float,
    left: float = 0.6,
) -> Picture:  # fmt: skip
    """Makes a panel per model, two side by side."""
    presets = list(dict.fromkeys(row["preset"] for row in rows))
    picture = Picture()
    picture.title(title, subtitle)
    width = (WIDTH - 2 * (left + MARGIN)) / 2
    for start in range(0, len(presets), 2):

        def part(area: Area, shown=presets[start : start + 2]) -> None:
            for index, preset in enumerate(shown):
                mine = [row for row in rows if row["preset"] == preset]
                layouts = list(dict.fromkeys(row["layout"] for row in mine))
                where = f" on {layouts[0]} GPUs" if len(layouts) == 1 else ""
                at = left + index * (width + left + MARGIN)
                area.text(at, 0.12, f"{preset}{where}", fontweight="bold")
                panel(area.axes(at, 0.27, width, height), mine)

        picture.add(0.27 + height + 0.5, part)
    picture.legend(legend)
    return picture


def _throughput(axes: Axes, rows: Sequence[Mapping]) -> None:
    """Draws groups of bars, one per layout; a cross for what does not fit."""
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    width = 0.84 / len(strategies)
    for row in rows:
        at = layouts.index(row["layout"]) - 0.42 + (strategies.index(row["strategy"]) + 0.5) * width
        colour = COLOURS.get(row["strategy"], FAINT_INK)
        if row["samples_per_s"]:
            axes.bar(at, row["samples_per_s"], width * 0.9, color=colour)
        else:
            axes.text(at, 0, "×", ha="center", va="bottom", fontsize=TEXT, color=colour)
    plain(axes, xlabel="nodes x GPUs", ylabel="samples per second")
    axes.set_xticks(range(len(layouts)), layouts)
    axes.set_xlim(-0.6, len(layouts) - 0.4)
    axes.set_ylim(bottom=0)
    if not all(row["samples_per_s"] for row in rows):
        axes.text(0.01, 0.97, "×: does not fit", transform=axes.transAxes, fontsize=SMALL, color=FAINT_INK, va="top")


def _phases(axes: Axes, rows: Sequence[Mapping]) -> None:
    """Draws a bar of seconds for each strategy, phase by phase."""
    for index, row in enumerate(rows):
        start = 0.0
        for phase, style in PHASES.items() if row["iteration_s"] else ():
            seconds = row["device_s"][phase]
            looks = {"hatch": style.hatch, "edgecolor": style.edge} if style.hatch else {}
            axes.barh(index, seconds, 0.72, left=start, color=style.colour, linewidth=0, **looks)
            start += seconds
        words = f" {start:.1f}" if row["iteration_s"] else " does not fit"
        axes.text(start, index, words, va="center_baseline", fontsize=SMALL, color=FAINT_INK)
    plain(axes, xlabel="seconds of an iteration")
    most = max((row["iteration_s"] or 0.0 for row in rows), default=0.0)
    axes.set_xlim(0, 1.14 * most or 1.0)
    axes.set_yticks(range(len(rows)), [row["strategy"] for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.4, -0.6)


def published(rows: Sequence[Mapping], path: Path) -> Path:
    """Draws the seconds of an iteration, forecast against published: a point per run, with the line on which they are
    equal."""
    picture = Picture()
    picture.title(
        "How near are forecasts to published runs?",
        "One point for each run that ReaL's authors published: LLaMA 7B to 70B on 8 to 64 GPUs.",
    )

    def part(area: Area) -> None:
        axes = area.axes(0.75, 0.1, 7.5, 3.6)
        seconds = [value for row in rows for value in (float(row["sec_per_iter"]), row["forecast_s"])]
        low, high = 0.85 * min(seconds), 1.18 * max(seconds)
        axes.fill_between(
            [low, high], [0.75 * low, 0.75 * high], [1.25 * low, 1.25 * high], color="#eef0f3", lw=0, label="within 25%"
        )
        axes.plot([low, high], [low, high], color=FAINT_INK, lw=1)
        for index, system in enumerate(dict.fromkeys(row["system"] for row in rows)):
            mine = [row for row in rows if row["system"] == system]
            fitted = any(row["seconds_are"] == "fitted" for row in mine)
            error = sum(abs(row["error"]) for row in mine) / len(mine)
            words = "two thirds fitted" if fitted else "forecast"
            axes.plot(
                [float(row["sec_per_iter"]) for row in mine], [row["forecast_s"] for row in mine], ls="", ms=6,
                marker=MARKERS[index], color=SYSTEMS[index], mec="white", mew=0.6,
                label=f"{system}: {words}, mean error {error:.{0 if error > 0.1 else 1}%}",
            )  # fmt: skip
        plain(axes, xlabel="published, seconds per iteration", ylabel="forecast, seconds per iteration")
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(FixedLocator((30, 50, 100, 200, 400)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_locator(NullLocator())
        axes.text(0.985 * high, 0.985 * high, "equal ", fontsize=SMALL, color=FAINT_INK, ha="right", va="bottom")
        axes.legend(
            fontsize=SMALL, frameon=False, loc="lower right", labelcolor=INK, labelspacing=0.8, handletextpad=0.3,
        )  # fmt: skip

    picture.add(4.25, part)
    picture.save(path)
    return path


def published_bars(rows: Sequence[Mapping], path: Path) -> Path:
    """Draws ReaL's figure of throughput: for each case and system a bar as published, and beside it the forecast."""
    picture = Picture()
    picture.title(
        "Do forecasts reproduce ReaL's figure of throughput?",
        "PFLOP/s of all GPUs by actor and critic, GPUs, new tokens. Left of each pair: published; hatched: forecast.",
    )
    systems = ("DeepSpeedChat", "OpenRLHF", "ReaL-Heuristic", "ReaL")
    titles = {
        "scale_actor": "a growing actor, critic of 7B",
        "scale_critic": "an actor of 7B, growing critic",
        "scale_both": "four equal models",
    }

    def panel(case: str) -> Callable[[Area], None]:
        of_case = [row for row in rows if row["case"] == case]
        settings = list(
            dict.fromkeys((row["gen_len"], row["actor_b"], row["critic_b"], row["n_gpus"]) for row in of_case)
        )

        def part(area: Area) -> None:
            axes = area.axes(0.6, 0.35, 7.7, 1.6)
            for row in of_case:
                setting = settings.index((row["gen_len"], row["actor_b"], row["critic_b"], row["n_gpus"]))
                system = systems.index(row["system"])
                published = float(row["pflops_per_s"])
                left = setting + 0.21 * system - 0.4
                axes.bar(left, published, 0.09, color=SYSTEMS[system])
                forecast = published * float(row["sec_per_iter"]) / row["forecast_s"]
                axes.bar(left + 0.09, forecast, 0.09, color="white", edgecolor=SYSTEMS[system], hatch="////", lw=0.6)
            labels = [f"{actor}B, {critic}B\n{gpus} GPUs\n{tokens}" for tokens, actor, critic, gpus in settings]
            plain(axes, xlabel="", ylabel="PFLOP/s")
            axes.set_xticks(range(len(settings)), labels, fontsize=SMALL - 0.5)
            axes.set_xlim(-0.6, len(settings) - 0.4)
            axes.set_title(titles[case], fontsize=SMALL, loc="left", color=INK)

        return part

    for case in titles:
        picture.add(2.55, panel(case))
    picture.legend([Style(name, SYSTEMS[index]) for index, name in enumerate(systems)])
    picture.save(path)
    return path


def maps(strategies: Sequence[str], path: Path) -> Path:
    """Draws which rank runs which call of PPO, on a node of eight devices."""
    programs = compile_all(strategies, make_workload(load("tiny")), Cluster.parse("1x8", "cpu"), {})
    picture_of(programs, {}, title="How do strategies place the calls of PPO on 8 ranks?", maps=True, by="").save(path)
    return path


def timelines(folder: Path = RESULTS) -> list[Path]:
    """Draws what `bench strategies` keeps: one iteration of each strategy on one axis, and the demo's. Both say whether
    they were measured."""
    found = json.loads(TIMELINES.read_text(encoding="utf-8"))
    workflow = make_workload(load("tiny")).workflow
    panels = [Timeline(name, one["records"]) for name, one in found["strategies"].items()]
    paths = [folder / "strategies.png", folder / "timeline_demo.png"]
    picture = Picture()
    picture.title(f"When do ranks wait? {len(panels)} strategies on {len(panels[0].records)} ranks", found["about"])
    add_stack(picture, panels, styles=palette.styles_of(workflow))
    picture.save(paths[0])
    write_png(
        paths[1],
        found["demo"],
        title=f"How does separation overlap its calls? 4 ranks, {found['kind']}",
        workflow=workflow,
    )
    return paths
