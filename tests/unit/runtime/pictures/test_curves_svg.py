"""Curves as SVG pictures."""

import re

import pytest

from rlhf_spmd.runtime.pictures.curves_svg import HEIGHT, WIDTH, curve, finite_points
from tests.unit.verbs.test_report import Tags


@pytest.mark.parametrize("line", [[], [(0, 1.0)], [(0, 2.0), (1, 2.0)], [(3, -1e-30), (4, 1e30)], [(0, 0.0), (9, 5.0)]])
@pytest.mark.parametrize("dots", [[], [(0, 7.0)], [(0, 1.0), (10, 3.0)]])
def test_curves_stay_inside_their_picture(line, dots):
    text = curve("a & b", line, dots)
    Tags(text)
    places = [float(x) for x in re.findall(r'(?:cx|x1|x2|x)="([-\d.e+]+)"', text)]
    heights = [float(y) for y in re.findall(r'(?:cy|y1|y2|y)="([-\d.e+]+)"', text)]
    for pair in re.findall(r'points="([^"]*)"', text):
        for x, y in (point.split(",") for point in pair.split()):
            places.append(float(x))
            heights.append(float(y))
    assert all(0 <= x <= WIDTH for x in places) and all(0 <= y <= HEIGHT for y in heights) and "nan" not in text
    assert text.count("<circle") == len(dots) + (len(line) == 1)


def test_points_that_are_no_numbers_are_left_out():
    assert finite_points([(0, 1), (1, None), (2, "x"), (3, float("inf")), (None, 3), (4, 2.5)]) == [(0, 1), (4, 2.5)]
