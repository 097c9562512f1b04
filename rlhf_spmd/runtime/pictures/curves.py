"""The curves of a metric inside a page: a colour for each run, one pair of axes for all of them.

Values of the iterations are a line, those of evaluations are dots on a dashed line, each with its 95% interval if the
standard error is known.
"""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rlhf_spmd.files.printing import formatted, printable
from rlhf_spmd.runtime.pictures.palette import FAINT_INK, INK, RULE
from rlhf_spmd.runtime.pictures.picture import SMALL, TEXT, svg_of

Point = tuple[float, float]
WIDTH, HEIGHT, LINE = 5.0, 2.3, 0.18  # of a picture, and of a line of its legend, in inches
TWO_SIDED = 1.96  # standard errors on either side of a mean: an interval of 95%
MOST = 1e300  # numbers below it can be drawn
LONGEST = 48  # characters of a run's name


class Series(NamedTuple):
    """What a picture shows of one run."""

    name: str
    colour: str
    line: Sequence[Point]  # (iteration, value) of training
    dots: Sequence[Point] = ()  # (iterations before it, value) of evaluations
    errors: Sequence[float] = ()  # standard error of each dot; none if they are not known

    @property
    def label(self) -> str:
        """The first and the last value, on held-out data if there are any, and the name."""
        points = self.dots or self.line
        name = self.name if len(self.name) <= LONGEST else f"{self.name[:LONGEST]}…"
        return f"{formatted(points[0][1])} → {formatted(points[-1][1])}  {name}"


def finite_points(pairs: Sequence[tuple[object, object]]) -> list[Point]:
    """Returns the pairs of finite numbers among (x, y)."""
    numbers = [(x, y) for x, y in pairs if isinstance(x, int | float) and isinstance(y, int | float)]
    return [(float(x), float(y)) for x, y in numbers if abs(x) < MOST and abs(y) < MOST]


def curves(title: str, series: Sequence[Series]) -> str:
    """Draws the curves of a metric as an SVG element. series: of the runs that have this metric; each has a point."""
    title, labels = printable(title), [printable(run.label) for run in series]
    figure = Figure((WIDTH, HEIGHT + LINE * len(series)), layout="constrained")
    axes = figure.add_subplot()
    handles = []
    for number, run in enumerate(series):
        # the line of a run with the same values remains visible behind the later one
        width = 1.6 + 2.4 * sum(later.line == run.line for later in series[number + 1 :])
        marker = "o" if len(run.line) == 1 else ""
        handles += axes.plot(*_columns(run.line), marker=marker, ls="-", lw=width, ms=4, color=run.colour)
        widths = [TWO_SIDED * error for error in run.errors] or None
        axes.errorbar(*_columns(run.dots), widths, fmt="o--", lw=1.2, ms=4, color=run.colour, capsize=2)
    heading = {"title": title, "title_fontproperties": {"size": TEXT, "weight": "bold"}, "alignment": "left"}
    looks = {"fontsize": SMALL, "labelcolor": INK, "frameon": False}
    figure.legend(handles, labels, loc="outside upper left", **heading, **looks)
    axes.set_xlabel("iteration", fontsize=SMALL, color=FAINT_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.yaxis.get_offset_text().set(fontsize=SMALL, color=FAINT_INK)
    axes.tick_params(labelsize=SMALL, color=RULE, labelcolor=FAINT_INK)
    axes.grid(axis="y", color=RULE)
    axes.spines[:].set_visible(False)
    return svg_of(figure, f"{title}: {'; '.join(labels)}")


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
