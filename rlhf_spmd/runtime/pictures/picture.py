"""A picture as a page that is filled from the top, in inches, so that all pictures have text of the same size.

At 8.5 inches and 150 dots per inch a page is 1275 pixels wide; shown at 800 pixels its text is still 10 pixels high.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rlhf_spmd.files.printing import printable
from rlhf_spmd.runtime.pictures.palette import FAINT_INK, INK, Style

WIDTH, DPI = 8.5, 150
MARGIN = 0.15  # at each side
TITLE, TEXT, SMALL = 11.0, 8.5, 8.0  # sizes of text, in points
CHARACTER = 0.0078  # inches that a character is wide, per point

# Names of runs may have any character; an SVG has text that can be searched, and the same bytes each time.
matplotlib.rcParams.update({"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "rlhf_spmd"})


@dataclass(frozen=True, slots=True)
class Area:
    """A part of the page. Texts and axes in it have coordinates in inches from its left and its top."""

    figure: Figure
    bottom: float
    height: float

    def text(self, x: float, y: float, words: str, *, size: float = TEXT, colour: str = INK, **looks: Any) -> None:
        """Writes words at x from the left and y from the top."""
        width, height = self.figure.get_size_inches()
        at = x / width, (self.bottom + self.height - y) / height
        self.figure.text(*at, printable(words), fontsize=size, color=colour, va="center", **looks)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Returns axes whose corner is at left and top."""
        page_width, page_height = self.figure.get_size_inches()
        bottom = self.bottom + self.height - top - height
        return self.figure.add_axes((left / page_width, bottom / page_height, width / page_width, height / page_height))


Part = Callable[[Area], None]


@dataclass(slots=True)
class Picture:
    """Parts from the top to the bottom, drawn when all have been added, since their heights add up to the picture's."""

    width: float = WIDTH
    parts: list[tuple[float, Part]] = field(default_factory=list)

    def add(self, height: float, part: Part) -> None:
        """Adds a part, which is `height` inches high."""
        self.parts.append((height, part))

    def title(self, title: str, subtitle: str = "") -> None:
        """Writes a heading, and below it the source of the numbers."""

        def part(area: Area) -> None:
            area.text(MARGIN, 0.24, title, size=TITLE, fontweight="bold")
            area.text(MARGIN, 0.47, subtitle, colour=FAINT_INK)

        self.add(0.62 if subtitle else 0.42, part)

    def legend(self, styles: Iterable[Style]) -> None:
        """Writes the meaning of the colours, in columns of equal width."""
        handles, longest = [], 0
        for label, colour, hatch, edge, _ in styles:
            handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor=edge, linewidth=0, label=label))
            longest = max(longest, len(label))
        inches = longest * CHARACTER * SMALL + 0.42  # of a column
        columns = max(1, min(len(handles), int((self.width - 2 * MARGIN) / inches)))

        def part(area: Area) -> None:
            page_width, page_height = area.figure.get_size_inches()
            area.figure.legend(
                handles=handles, loc="upper left", ncols=columns, frameon=False, fontsize=SMALL, labelcolor=INK,
                bbox_to_anchor=(0.5 * MARGIN / page_width, (area.bottom + area.height) / page_height),
                handlelength=1.7, handleheight=1.0, columnspacing=1.3, borderaxespad=0.2, labelspacing=0.45,
            )  # fmt: skip

        self.add(0.12 + 0.19 * -(-len(handles) // columns), part)

    def draw(self) -> Figure:
        """Draws the figure."""
        top = sum(height for height, _ in self.parts) + 0.08
        figure = Figure(figsize=(self.width, top), dpi=DPI, facecolor="white")
        for inches, part in self.parts:
            top -= inches
            part(Area(figure, top, inches))
        return figure

    def save(self, path: str | Path) -> None:
        """Writes it as a PNG file."""
        self.draw().savefig(path, format="png")


def svg_of(figure: Figure, label: str) -> str:
    """Returns a figure as an SVG element of a page. label: what it shows, for readers that don't see it."""
    file = StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has more fonts
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    element = file.getvalue().partition("<svg")[2]
    return f'<svg role="img" aria-label="{escape(label)}"{element}'
