"""Tables of a calibration: curves between and beyond what was measured, and the link that a ring fits."""

import pytest

from rlhf_spmd.plan.cost.calibration import ByLength, Calibration, Curve, Device, Layered, Link, Measured
from rlhf_spmd.plan.workload import ModelShape

SHAPE = ModelShape(0, 64, 176, 8, 4, 8, 512)


def line(slope: float, start: float = 0.0) -> Curve:
    """Returns start + slope * amount."""
    return Curve((1.0, 2.0), (start + slope, start + 2 * slope))


def table(**parts) -> Measured:
    """Makes a table in which a layer takes a second for each token, the rest ten; longer sequences take twice as
    long."""
    short, long = Layered(line(1.0), line(0.0, 10.0)), Layered(line(2.0), line(0.0, 20.0))
    by_length = ByLength((4.0, 8.0), (short, long))
    return Measured(SHAPE, 1, 2, by_length, by_length, line(1e-3), **parts)


def calibration(*measured: Measured) -> Calibration:
    device = Device(1e9, 1e9, 1e9, 0.1, 0.2, decode_reduce_s=0.3, num_workers=2, measured=measured)
    return Calibration("mine", {"cpu": device}, Link(1e6, 0.5), Link(1e5, 1.5), "made up")


def test_a_curve_is_straight_between_its_points_and_beyond():
    curve = Curve((1.0, 3.0, 5.0), (10.0, 20.0, 60.0))
    for amount, seconds in ((1, 10), (2, 15), (3, 20), (4, 40), (5, 60), (7, 100), (0, 5)):
        assert curve.at(amount) == pytest.approx(seconds)
    assert Curve((1.0, 2.0), (1.0, 3.0)).at(0.0) == 0.0  # not -1


def test_lengths_are_between_their_tables():
    by_length = table().forward
    assert by_length.at(3, 5.0, 4.0) == pytest.approx(3 * 5 + 10)
    assert by_length.at(3, 5.0, 8.0) == pytest.approx(2 * (3 * 5 + 10))
    assert by_length.at(3, 5.0, 5.0) == pytest.approx(1.25 * (3 * 5 + 10))
    assert by_length.at(3, 5.0, 1.0) == by_length.at(3, 5.0, 4.0)
    assert by_length.at(3, 5.0, 99.0) == by_length.at(3, 5.0, 8.0)
    assert by_length.at(3, 5.0, 8.0, rest=False) == pytest.approx(2 * 3 * 5)
