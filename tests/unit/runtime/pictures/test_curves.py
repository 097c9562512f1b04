"""Curves inside a page: nothing is cut, and every run is seen."""

import pytest
from matplotlib.figure import Figure

from rlhf_spmd.runtime.pictures import curves
from rlhf_spmd.runtime.pictures.curves import Series
from rlhf_spmd.runtime.pictures.palette import run_colours
from tests.unit.verbs.test_report import Tags

VALUES = [[0.25, 0.98], [2.5e-7, 2.505e-7], [0.0, 0.0], [-3.21, 1.23e5], [1e-300, 1.0], [-1e299, 1e299], [1e9, 1e9 + 1]]


def drawn(monkeypatch, series: list[Series]) -> tuple[Figure, str]:
    """Returns the figure and its SVG element."""
    figures = []
    svg_of = curves.svg_of
    with monkeypatch.context() as patch:
        patch.setattr(curves, "svg_of", lambda figure, label: (figures.append(figure), svg_of(figure, label))[1])
        text = curves.curves("a metric & $its$ name", series)
    return figures[0], text


@pytest.mark.parametrize("num_runs", [1, 11])
@pytest.mark.parametrize("values", VALUES)
def test_no_text_is_cut(values, num_runs, monkeypatch):
    """Labels such as 0.002505 began left of the picture."""
    names = ["ppo", "a-run-whose-name-says-what-is-swept-kl-0.05-seed-17", "_WWWWW@@@@@MMMMM" * 5, "ЩЖШ-$опыт"]
    colours = run_colours(num_runs)
    series = [
        Series(names[run % 4], colours[run], [(i, v * (run + 1)) for i, v in enumerate(values, 98)], [(0, values[0])])
        for run in range(num_runs)
    ]
    figure, text = drawn(monkeypatch, series)
    seen = Tags(text)
    assert any("$опыт" in word for word in seen.words) == (num_runs > 3) and "a metric & $its$ name" in seen.words
    assert all(colour in text for colour in colours)
    box = figure.get_tightbbox(figure.canvas.get_renderer()) if hasattr(figure.canvas, "get_renderer") else None
    width, height = figure.get_size_inches()
    assert box is None or (box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height)


@pytest.mark.parametrize("line", [[], [(1, 1.0)], [(1, 2.0), (2, 2.0)]])
@pytest.mark.parametrize("dots", [[], [(0, 7.0)], [(0, 1.0), (10, 3.0)]])
def test_lines_and_dots_lie_on_the_same_axes(line, dots, monkeypatch):
    if line or dots:
        figure, _ = drawn(monkeypatch, [Series("run", "#123456", line, dots)])
        shown = [list(map(tuple, curve.get_xydata())) for curve in figure.axes[0].lines]
        assert shown == [line, dots] and figure.axes[0].lines[1].get_marker() == "o"
