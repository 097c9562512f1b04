"""A placement as a map: calls from the top to the bottom, ranks from the left to the right, a box for each copy.

A column shows the calls of one rank in an iteration. A box is one copy of a model, on one rank or on several: thin
lines divide it into tensor slices, and later pipeline stages are lighter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.runtime.pictures.palette import FAINT_INK, IDLE, INK, Style, mix, styles_of
from rlhf_spmd.runtime.pictures.picture import CHARACTER, MARGIN, SMALL, TEXT, WIDTH, Area, Picture

LEFT, GAP, ROW = 1.25, 0.17, 0.235  # inches
ACROSS = ((8, 5), (16, 3), (64, 2))  # (largest number of ranks, maps side by side)
KEY = {"pp": "pp: its pipeline stages, later ones lighter", "tp": "tp: its tensor-parallel ranks"}


class Map(NamedTuple):
    title: str
    program: Program


def add_maps(picture: Picture, maps: Sequence[Map]) -> None:
    """Draws the maps side by side, in as few rows as their ranks allow. All have the same calls."""
    ranks = max(one.program.cluster.num_devices for one in maps)
    most = next((number for limit, number in ACROSS if ranks <= limit), 1)
    down = -(-len(maps) // most)
    across = -(-len(maps) // down)
    workflow = maps[0].program.workload.workflow
    calls, styles = workflow.placed_calls, styles_of(workflow)
    num_alike = Counter(styles[call.name].label for call in calls)
    width = (WIDTH - LEFT - MARGIN - GAP * (across - 1)) / across
    for start in range(0, len(maps), across):

        def part(area: Area, shown=maps[start : start + across]) -> None:
            for row, call in enumerate(calls):
                label = styles[call.name].label
                words = label if num_alike[label] == 1 else call.name.replace("_", " ")
                area.text(LEFT - 0.1, 0.33 + (row + 0.5) * ROW, words, size=SMALL, ha="right")
            for index, one in enumerate(shown):
                left = LEFT + index * (width + GAP)
                area.text(left, 0.18, one.title, size=TEXT, fontweight="bold")
                axes = area.axes(left, 0.33, width, ROW * len(calls))
                _draw(axes, one.program, [(call.name, styles[call.name]) for call in calls], width)
            area.text(LEFT - 0.1, 0.33 + len(calls) * ROW + 0.085, "rank", size=SMALL, colour=FAINT_INK, ha="right")

        picture.add(0.33 + ROW * len(calls) + 0.3, part)
    layouts = [layout for one in maps for layout in one.program.placement.layouts.values()]
    split = [words for name, words in KEY.items() if any(getattr(layout, name) > 1 for layout in layouts)]
    nodes = ["dashed: nodes"] * any(len(one.program.cluster.nodes) > 1 for one in maps)
    key = "; ".join(["box: one copy of the model", *split, "grey: idle", *nodes])
    picture.add(0.22, lambda area: area.text(LEFT, 0.08, key, size=SMALL, colour=FAINT_INK))


def _draw(axes: Axes, program: Program, calls: Sequence[tuple[str, Style]], inches: float) -> None:
    """Draws one map."""
    size = program.cluster.num_devices
    cell = inches / size
    axes.set_xlim(0, size)
    axes.set_ylim(len(calls), 0)
    axes.spines[:].set_visible(False)
    for row, (name, style) in enumerate(calls):
        axes.broken_barh([(0, size)], (row + 0.08, 0.84), facecolor=IDLE, linewidth=0, zorder=1)
        layout = program.placement.layouts[name]
        _draw_boxes(axes, row, layout, style, edge=min(0.9, 8 * cell))
        _write_grid(axes, row, layout, style, cell)
    for rank in range(1, size):
        if program.cluster.node_of(rank) != program.cluster.node_of(rank - 1):
            axes.axvline(rank, color=INK, linewidth=0.9, linestyle=(0, (3, 2)), zorder=5, clip_on=False)
    room = CHARACTER * SMALL * (len(str(size - 1)) + 1)
    step = next(2**power for power in range(20) if 2**power * cell >= room)
    axes.set_xticks([rank + 0.5 for rank in range(0, size, step)], [str(rank) for rank in range(0, size, step)])
    axes.set_yticks([])
    axes.tick_params(length=0, labelsize=SMALL, labelcolor=FAINT_INK, pad=1)


def _draw_boxes(axes: Axes, row: int, layout: Layout, style: Style, edge: float) -> None:
    """Draws a cell for each rank; white edges between copies, thin ones between the ranks of a copy."""
    owner = {rank: layout.dp_index(rank) for rank in layout.ranks}
    for rank in layout.ranks:
        _, stage, _ = layout.coordinates(rank)
        colour = mix(style.colour, "#ffffff", min(0.6, 0.35 * stage))
        axes.broken_barh([(rank, 1)], (row + 0.08, 0.84), facecolor=colour, linewidth=0, zorder=2)
    for left, right in pairwise(sorted(layout.ranks)):
        if right == left + 1:
            apart = owner[left] != owner[right]
            width, alpha = (2.2, 1.0) if apart else (0.6, 0.6)
            looks: dict[str, Any] = {"linewidth": width * edge, "alpha": alpha}
            axes.plot([right, right], [row + 0.08, row + 0.92], color="white", zorder=3, solid_capstyle="butt", **looks)


def _write_grid(axes: Axes, row: int, layout: Layout, style: Style, cell: float) -> None:
    """Writes the degrees of parallelism into each box that has room: in the first stage, else in the whole copy."""
    words = " ".join(f"{name}{size}" for name, size in (("pp", layout.pp), ("tp", layout.tp)) if size > 1)
    size = layout.pp * layout.tp
    for start in range(0, len(layout.ranks), size):
        places = layout.ranks[start : start + layout.tp], layout.ranks[start : start + size]
        for ranks in places if words else ():
            if ranks[-1] - ranks[0] == len(ranks) - 1 and len(ranks) * cell > CHARACTER * SMALL * (len(words) + 0.3):
                middle = (ranks[0] + ranks[-1] + 1) / 2
                rim = withStroke(linewidth=2.4, foreground=style.colour)  # keeps lines off the letters
                axes.text(
                    middle, row + 0.5, words, ha="center", va="center_baseline", fontsize=SMALL, color=style.ink,
                    zorder=6, path_effects=[rim],
                )  # fmt: skip
                break
