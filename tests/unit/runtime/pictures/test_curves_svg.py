"""Curves as SVG pictures: nothing is cut, and no text lies on another."""

import re
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest

from rlhf_spmd.runtime.pictures.curves_svg import Series, curves, finite_points, shortened, thinned, width_of
from rlhf_spmd.runtime.pictures.palette import run_colours
from tests.unit.verbs.test_report import Tags

Box = tuple[float, float, float, float]
VALUES = [
    [0.25, 0.98],
    [2.5e-7, 2.505e-7],
    [-1e-30, 1e30],
    [0.0, 0.0],
    [-3.21, 1.23e5],
    [1e-300, 1.0],
    [0.002505, 0.0023],
]


def boxes(svg: str) -> dict[str, Box]:
    """Returns left, top, right and bottom of each text in DejaVu Sans, the widest of the usual fonts."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    found = {}
    for number, one in enumerate(ElementTree.fromstring(svg).iter("text")):
        font = FontProperties(family="DejaVu Sans", weight=one.get("font-weight"), size=float(one.get("font-size")))
        wide, high, below = TextToPath().get_text_width_height_descent(one.text, font, ismath=False)
        left = float(one.get("x")) - wide * {"start": 0.0, "middle": 0.5, "end": 1.0}[one.get("text-anchor")]
        bottom = float(one.get("y")) + below
        found[f"{number}: {one.text}"] = left, bottom - high, left + wide, bottom
    return found


def check(svg: str) -> None:
    """Checks that all texts are inside the picture, and apart from each other."""
    _, _, wide, high = map(float, ElementTree.fromstring(svg).get("viewBox").split())
    found = boxes(svg)
    for name, (left, top, right, bottom) in found.items():
        assert left >= 0 and top >= 0 and right <= wide and bottom <= high, name
    for (one, a), (other, b) in combinations(found.items(), 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (one, other)


@pytest.mark.parametrize("num_runs", [1, 3, 11])
@pytest.mark.parametrize("values", VALUES)
def test_no_text_is_cut_or_lies_on_another(values, num_runs):
    """Labels such as 0.002505 began left of the picture."""
    names = ["ppo", "a-run-whose-name-says-what-is-swept-kl-0.05-seed-17", "WWWWW@@@@@MMMMM" * 3, "ЩЖШ-опыт"]
    colours = run_colours(num_runs)
    series = [
        Series(
            names[run % 4], colours[run], [(i, v * (run + 1)) for i, v in enumerate(values, 99_998)], [(0, values[0])]
        )
        for run in range(num_runs)
    ]
    svg = curves("a metric & its name", series)
    check(svg)
    assert len(set(colours)) == num_runs == svg.count('rx="2"')
    for colour in colours:
        assert svg.count(f'stroke="{colour}"') == 1 and svg.count(f'fill="{colour}"') == 2  # line; legend and dot


@pytest.mark.parametrize("line", [[], [(1, 1.0)], [(1, 2.0), (2, 2.0)], [(3, -1e-30), (4, 1e30)], [(1, 0.0), (9, 5.0)]])
@pytest.mark.parametrize("dots", [[], [(0, 7.0)], [(0, 1.0), (10, 3.0)]])
def test_curves_stay_inside_their_picture(line, dots):
    if not line and not dots:
        return
    text = curves("a & b", [Series("run", "#123456", line, dots)])
    Tags(text)
    _, _, wide, high = map(float, ElementTree.fromstring(text).get("viewBox").split())
    xs = [float(x) for x in re.findall(r'(?:cx|x1|x2|x)="([-\d.e+]+)"', text)]
    ys = [float(y) for y in re.findall(r'(?:cy|y1|y2|y)="([-\d.e+]+)"', text)]
    for pair in re.findall(r'points="([^"]*)"', text):
        xs += [float(point.split(",")[0]) for point in pair.split()]
        ys += [float(point.split(",")[1]) for point in pair.split()]
    assert all(0 <= x <= wide for x in xs) and all(0 <= y <= high for y in ys) and "nan" not in text
    assert text.count("<circle") == len(dots) + (len(line) == 1)


def test_points_that_are_no_numbers_are_left_out():
    pairs = [(0, 1), (1, None), (2, "x"), (3, float("inf")), (None, 3), (4, 2.5), (5, float("nan")), (6, 1e308)]
    assert finite_points(pairs) == [(0, 1), (4, 2.5)]


def test_a_long_curve_keeps_its_ends_and_peaks():
    points = [(float(i), 9.0 if i == 31_234 else float(i % 7)) for i in range(100_000)]
    found = thinned(points)
    assert len(found) < 2000 and found[0] == points[0] and found[-1] == points[-1] and points[31_234] in found
    assert all(a[0] < b[0] for a, b in pairwise(found)) and thinned(points[:100]) == points[:100]


def test_words_are_cut_to_a_width():
    assert shortened("short", 100) == "short" and shortened("", 1) == ""
    cut = shortened("a very long name of a run", 80)
    assert cut.endswith("…") and width_of(cut) <= 80 and cut.startswith("a very")


def test_equal_runs_are_both_visible():
    """Runs under different placements have the same numbers, so the last one hid all others."""
    line = [(1.0, 0.0), (2.0, 1.0)]
    runs = [("a", line), ("b", [(1.0, 0.5), (2.0, 0.0)]), ("c", line), ("d", line)]
    svg = curves("reward", [Series(name, "#123456", points) for name, points in runs])
    assert re.findall(r'polyline.*?stroke-width="([\d.]+)"', svg) == ["6.4", "1.6", "4", "1.6"]
