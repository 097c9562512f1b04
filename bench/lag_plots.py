"""The picture of what a lag costs of learning (bench/numbers/lag.py), drawn from committed rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from bench.ahead_tables import paired
from bench.numbers.lag import CORRECTIONS, LAGS, PAGES
from bench.plots import plain
from rlhf_spmd.runtime.pictures.palette import RULE, SYSTEMS, Style
from rlhf_spmd.runtime.pictures.picture import Area, Picture

LEFT, STEP, INCHES = 0.75, 4.05, (3.3, 2.1)  # of two panels side by side
APART = 0.12  # between the corrections of a lag


def lags(rows: Sequence[dict], path: Path) -> Path:
    """A panel for each algorithm: the difference from lag 0, with its interval, of each lag and correction."""
    found, colours = paired(rows), dict(zip(CORRECTIONS, SYSTEMS, strict=True))
    seeds = sorted({one["seeds"] for one in found})
    picture = Picture()
    picture.title(
        "What does it cost to train on responses of weights that are 1, 2 or 4 iterations old?",
        f"Mean accuracy over a run, less that of lag 0 with the same seed: mean and 95% interval of {seeds[-1]} pairs.",
    )

    def panels(area: Area) -> None:
        for at, page in enumerate(PAGES):
            axes = area.axes(LEFT + at * STEP, 0.3, *INCHES)
            area.text(LEFT + at * STEP, 0.14, page.upper(), fontweight="bold")
            axes.axhline(0, color=RULE, lw=1)
            for number, name in enumerate(CORRECTIONS):
                mine: list[Mapping] = [one for one in found if (one["page"], one["correction"]) == (page, name)]
                places = [LAGS.index(one["lag"]) + (number - 1.5) * APART for one in mine]
                differences, halves = ([100 * one[key] for one in mine] for key in ("difference", "half"))
                axes.errorbar(places, differences, halves, fmt="o", ms=4, lw=1.2, color=colours[name], capsize=2)
            axes.xaxis.set_major_locator(FixedLocator(range(len(LAGS))))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: str(LAGS[round(place)])))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlim(-0.5, len(LAGS) - 0.5)
            plain(axes, xlabel="lag, iterations", ylabel="points of accuracy")

    picture.add(3.0, panels)
    picture.legend([Style(name, colour) for name, colour in colours.items()])
    picture.save(path)
    return path
