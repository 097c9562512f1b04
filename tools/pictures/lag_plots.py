"""How much accuracy a lag costs: a picture of the rows of `bench lag`, drawn by `python -m tools pictures`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from bench.numbers.lag import CORRECTIONS, LAGS, PAGES, paired
from rlhf_spmd.runtime.pictures.palette import FAINT_INK, RULE, RUNS, Style
from rlhf_spmd.runtime.pictures.picture import MARGIN, TEXT, WIDTH, Area, Picture
from tools.pictures.plots import plain

LEFT, HEIGHT = 0.7, 2.4  # inches beside a panel for its axis, and of a panel
MARKERS = "os^DvP"
STEP = 0.06  # between the corrections of a lag, so that their intervals lie side by side


def lag_picture(rows: Sequence[Mapping], path: Path) -> Path:
    """Draws a panel for each algorithm: mean differences from lag 0 with their 95% intervals, by lag and correction.

    rows: of `bench lag`, complete or not.
    """
    pairs = paired([row for row in rows if not row["warmup"]])
    seeds = sorted({one["seeds"] for one in pairs})
    picture = Picture()
    picture.title(
        "How much accuracy does a lag cost?",
        "Measured on one rank: mean held-out accuracy less that of lag 0 with the same seed; 95% intervals of "
        f"{' to '.join(map(str, dict.fromkeys([*seeds[:1], *seeds[-1:]]))) or 'no'} pairs.",
    )
    width = (WIDTH - 2 * (LEFT + MARGIN)) / 2
    ends = [100 * (one["difference"] + sign * one["half"]) for one in pairs for sign in (-1, 1)]

    def part(area: Area) -> None:
        for index, page in enumerate(PAGES):
            at = LEFT + index * (width + LEFT + MARGIN)
            area.text(at, 0.12, page.upper(), fontweight="bold")
            axes = area.axes(at, 0.27, width, HEIGHT)
            axes.set_ylim(min(ends, default=-1) - 1, max(ends, default=1) + 1)  # one scale for both
            _panel(axes, [one for one in pairs if one["page"] == page])

    picture.add(0.27 + HEIGHT + 0.5, part)
    picture.legend([Style(name, colour) for name, colour in zip(CORRECTIONS, RUNS, strict=False)])
    picture.save(path)
    return path


def _panel(axes: Axes, pairs: Sequence[Mapping]) -> None:
    axes.axhline(0.0, color=RULE, lw=1.2, zorder=0)
    for index, correction in enumerate(CORRECTIONS):
        mine = sorted((one for one in pairs if one["correction"] == correction), key=lambda one: one["lag"])
        axes.errorbar(
            [one["lag"] + STEP * (index - (len(CORRECTIONS) - 1) / 2) for one in mine],
            [100 * one["difference"] for one in mine], [100 * one["half"] for one in mine], color=RUNS[index],
            marker=MARKERS[index], ms=5, mec="white", mew=0.6, lw=1.0, elinewidth=1.3, capsize=2.5, label=correction,
        )  # fmt: skip
    plain(axes, xlabel="lag of the weights, iterations", ylabel="difference, points")
    axes.set_xticks(LAGS)
    axes.set_xlim(LAGS[0] - 0.5, LAGS[-1] + 0.5)
    if not pairs:
        axes.text(0.5, 0.6, "not measured yet", transform=axes.transAxes, fontsize=TEXT, color=FAINT_INK, ha="center")
