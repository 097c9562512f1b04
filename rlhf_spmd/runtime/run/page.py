"""A picture as a page that is filled from the top, in inches: text of one size, whatever the picture shows.

At 8.5 inches and 150 dots per inch a page is 1275 pixels wide; shown at 800 pixels its text is still 10 pixels high.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_spmd.runtime.run.palette import FAINT_INK, INK, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, DPI = 8.5, 150
MARGIN = 0.15  # at each side
TITLE, TEXT, SMALL = 11.0, 8.5, 8.0  # sizes of text, in points
CHARACTER = 0.0078  # inches that a character is wide, per point


@dataclass(frozen=True, slots=True)
class Place:
    """A part of the page: where it is, in inches; texts and axes are placed in it from its left and its top."""

    figure: Figure
    bottom: float
    height: float

    def text(self, x: float, y: float, words: str, *, size: float = TEXT, colour: str = INK, **options: Any) -> None:
        """Writes words at x from the left and y from the top."""
        width, height = self.figure.get_size_inches()
        at = x / width, (self.bottom + self.height - y) / height
        self.figure.text(*at, words, fontsize=size, color=colour, **({"va": "center"} | options))

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes whose corner is at left and top."""
        page_width, page_height = self.figure.get_size_inches()
        bottom = self.bottom + self.height - top - height
        return self.figure.add_axes((left / page_width, bottom / page_height, width / page_width, height / page_height))


Part = Callable[[Place], None]


@dataclass(slots=True)
class Page:
    """Parts from the top to the bottom. They are drawn when all are known, because only then the height is."""

    width: float = WIDTH
    parts: list[tuple[float, Part]] = field(default_factory=list)

    def add(self, height: float, part: Part) -> None:
        """A part of so many inches."""
        self.parts.append((height, part))

    def title(self, title: str, subtitle: str = "") -> None:
        """A heading, with a line below that says where the numbers come from."""

        def part(place: Place) -> None:
            place.text(MARGIN, 0.24, title, size=TITLE, fontweight="bold")
            place.text(MARGIN, 0.47, subtitle, colour=FAINT_INK)

        self.add(0.62 if subtitle else 0.42, part)

    def legend(self, styles: Iterable[Style]) -> None:
        """What the colours mean, in columns."""
        from matplotlib.patches import Patch

        found = list(styles)
        columns = next(n for n in range(len(found), 0, -1) if n == 1 or self._width(found, n) < self.width - 2 * MARGIN)
        rows = -(-len(found) // columns)
        handles = [
            Patch(facecolor=style.colour, hatch=style.hatch, edgecolor=style.edge, linewidth=0, label=style.label)
            for style in found
        ]

        def part(place: Place) -> None:
            page_width, page_height = place.figure.get_size_inches()
            place.figure.legend(
                handles=handles, loc="upper left", ncols=columns, frameon=False, fontsize=SMALL, labelcolor=INK,
                bbox_to_anchor=(0.5 * MARGIN / page_width, (place.bottom + place.height) / page_height),
                handlelength=1.7, handleheight=1.0, columnspacing=1.3, borderaxespad=0.2, labelspacing=0.45,
            )  # fmt: skip

        self.add(0.12 + 0.19 * rows, part)

    @staticmethod
    def _width(styles: Sequence[Style], columns: int) -> float:
        """Inches of a legend, which is filled column by column."""
        rows, longer = divmod(len(styles), columns)
        ends = [number * rows + min(number, longer) for number in range(columns + 1)]
        longest = [max(len(style.label) for style in styles[a:b]) for a, b in pairwise(ends)]
        return sum(longest) * CHARACTER * SMALL + 0.42 * columns

    def draw(self) -> Figure:
        """The figure."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        height = sum(height for height, _ in self.parts) + 0.08
        figure = Figure(figsize=(self.width, height), dpi=DPI, facecolor="white")
        FigureCanvasAgg(figure)
        top = height
        for inches, part in self.parts:
            top -= inches
            part(Place(figure, top, inches))
        return figure

    def save(self, path: str | Path) -> None:
        """Writes it as a PNG file."""
        self.draw().savefig(path, format="png")


def halo(colour: str) -> list[Any]:
    """Path effects of words on a colour: a rim of it, so that lines behind them do not cross the letters."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.4, foreground=colour)]


def plain(axes: Axes, *, xlabel: str = "", ylabel: str = "") -> None:
    """Axes without a frame, with labels that can be read."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT_INK)
    axes.tick_params(labelsize=SMALL, color=FAINT_INK, labelcolor=INK)
    axes.set_xlabel(xlabel, fontsize=TEXT, color=INK)
    axes.set_ylabel(ylabel, fontsize=TEXT, color=INK)
