"""Tables of a calibration: curves between and beyond what was measured, files there and back, files that are wrong."""

import json
from dataclasses import replace

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import (
    SHIPPED,
    check_out,
    load_calibration,
    read_calibration,
    write_calibration,
)
from rlhf_spmd.plan.cost.calibration import ByLength, Calibration, Curve, Device, Layered, Link, Measured, fit_link
from rlhf_spmd.plan.cost.seconds import all_gather_s
from rlhf_spmd.plan.workload import ModelShape

SHAPE = ModelShape(0, 64, 176, 8, 4, 8, 512)


def line(slope: float, start: float = 0.0) -> Curve:
    """start + slope * amount."""
    return Curve((1.0, 2.0), (start + slope, start + 2 * slope))


def table(**parts) -> Measured:
    """A layer takes a second for each token, the rest ten; longer sequences take twice as long."""
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


def test_a_table_is_of_a_shape_whatever_its_layers():
    device = calibration(table(), replace(table(), tp=2)).devices["cpu"]
    assert device.table(replace(SHAPE, num_layers=12), 2, 2).tp == 2
    assert device.table(replace(SHAPE, num_layers=12), 4, 2) is None
    assert device.table(SHAPE, 1, 4) is None
    assert device.table(replace(SHAPE, scalar_head=True), 1, 2) is None


def test_a_file_comes_back_as_it_was(tmp_path):
    path = str(tmp_path / "mine.json")
    drawn = table(prefill=table().forward, decode=table().forward.tables[0], ends=line(1e-3))
    for one in (calibration(), calibration(table(), replace(drawn, tp=2))):
        write_calibration(one, path)
        assert read_calibration(path) == one
    assert max(map(len, (tmp_path / "mine.json").read_text(encoding="utf-8").splitlines())) < 120


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_what_is_shipped_can_be_read(path):
    found = load_calibration(path.stem)
    assert found.name == path.stem and found.provenance
    assert len({(one.shape, one.tp, one.param_bytes) for d in found.devices.values() for one in d.measured}) == sum(
        len(device.measured) for device in found.devices.values()
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda file: file.update(version=7), "version 7"),
        (lambda file: file["devices"]["cpu"].update(speed=1), "devices.cpu.speed"),
        (lambda file: first(file)["forward"].pop("tables"), r"measured\.0\.forward\.tables"),
        (lambda file: first(file)["forward"]["tables"].pop(), "1 tables are for lengths"),
        (lambda file: first(file)["update"]["seconds"].pop(), "2 amounts, but 1 seconds"),
        (lambda file: first(file)["update"].update(amounts=[2.0, 1.0]), "at least two amounts that ascend"),
        (lambda file: first(file)["update"].update(amounts=[2.0], seconds=[1.0]), "at least two amounts"),
        (lambda file: first(file)["update"].update(seconds=[-1.0, 1.0]), r"update\.seconds\.0"),
        (lambda file: first(file)["shape"].pop("hidden_size"), r"shape\.hidden_size"),
    ],
)
def test_a_bad_file_is_one_message(tmp_path, change, says):
    path = tmp_path / "mine.json"
    write_calibration(calibration(table()), str(path))
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match=rf"mine\.json.*{says}") as error:
        read_calibration(str(path))
    assert "\n" not in str(error.value)


def first(file: dict) -> dict:
    return file["devices"]["cpu"]["measured"][0]


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match=r"unknown calibration 'a100-80' \(did you mean 'a100-80g'\?\)"):
        load_calibration("a100-80")
    with pytest.raises(UserError, match="does not know devices of type a100-80g, only cpu"):
        calibration().require("a100-80g")


def test_where_a_calibration_may_be_written(tmp_path):
    check_out(str(tmp_path / "mine.json"))
    (tmp_path / "mine.json").touch()
    check_out(str(tmp_path / "mine.json"), overwrite=True)
    for path, says in (("mine.json", "exists"), ("mine.txt", r"\.json"), ("no/mine.json", "cannot be written")):
        with pytest.raises(UserError, match=says):
            check_out(str(tmp_path / path))


def test_the_link_of_a_ring_is_found():
    link = Link(2e9, 3e-5)
    times = [(n, size, all_gather_s(link, n, size)) for n in (2, 4, 8) for size in (1e3, 1e5, 1e7)]
    found = fit_link(times)
    assert found.bytes_per_s == pytest.approx(2e9, rel=1e-6) and found.latency_s == pytest.approx(3e-5, rel=1e-6)
    assert fit_link([(2, 1e3, 3e-5), (2, 1e7, 1e-5)]).latency_s > 0  # noise: larger was faster
