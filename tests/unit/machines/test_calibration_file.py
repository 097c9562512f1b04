"""Files of calibrations: what is written comes back, and what is wrong with one is one message."""

import json
from dataclasses import replace

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import (
    SHIPPED,
    load_calibration,
    read_calibration,
    write_calibration,
)
from rlhf_spmd.plan.cost.calibration import OF_DEVICE
from tests.unit.plan.cost.test_calibration import calibration, line, table


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
        (lambda file: file.update(version=7), "version 1; measure"),
        (lambda file: file["devices"]["cpu"].update(speed=1), "devices.cpu.speed"),
        (lambda file: first(file)["forward"].pop("tables"), r"measured\.0\.forward\.tables"),
        (lambda file: first(file)["forward"]["tables"].pop(), "1 tables are for lengths"),
        (lambda file: first(file)["update"]["seconds"].pop(), "seconds for each, not .* with 1 seconds"),
        (
            lambda file: first(file)["update"].update(seconds=[-1.0, 1.0]),
            r"update\.seconds: -1\.0 should be at least 0",
        ),
        (lambda file: file["devices"]["cpu"].update(matrix_flops=0), r"devices\.cpu\.matrix_flops: 0.* greater than 0"),
        (lambda file: first(file)["update"].update(amounts=[2.0, 1.0]), "at least two amounts that ascend"),
        (lambda file: first(file)["update"].update(amounts=[2.0], seconds=[1.0]), "at least two amounts"),
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


SMALLEST = """{"version": 1, "provenance": "none", "sources": {"layer_s": "fitted"}, "devices": {"cpu": {
    "matrix_flops": 1, "memory_bytes_per_s": 1, "host_bytes_per_s": 1, "layer_s": 1, "decode_layer_s": 1}},
    "inside": {"bytes_per_s": 1, "latency_s": 0}, "between": {"bytes_per_s": 1, "latency_s": 0}}"""


def test_a_calibration_says_where_its_constants_come_from(tmp_path):
    (tmp_path / "mine.json").write_text(SMALLEST, encoding="utf-8")
    assert read_calibration(str(tmp_path / "mine.json")).sources == {"layer_s": "fitted"}
    for name in ("a100-80g", "h100-80g", "cpu-2core"):
        calibration = load_calibration(name)
        constants = {f"{link}.{one}" for link in ("inside", "between", "host") for one in ("bytes_per_s", "latency_s")}
        for device in calibration.devices.values():
            constants |= {one for one in OF_DEVICE if getattr(device, one) is not None}
        assert set(calibration.sources) == constants, name


def test_a_network_by_name_replaces_the_link_between_nodes(tmp_path):
    (tmp_path / "mine.json").write_text(SMALLEST, encoding="utf-8")
    for name in ("a100-80g", str(tmp_path / "mine.json")):
        given, found = load_calibration(name), load_calibration(f"{name}+200g-per-node")
        assert (found.between.bytes_per_s, found.name) == (25e9 / 8, f"{given.name}+200g-per-node")
        assert (found.devices, found.inside) == (given.devices, given.inside)
    (tmp_path / "a+b.json").write_text(SMALLEST, encoding="utf-8")
    assert load_calibration(str(tmp_path / "a+b.json")).name == "a+b"
    with pytest.raises(UserError, match="did you mean '200g-per-node'"):
        load_calibration("a100-80g+200g-per-nod")
    with pytest.raises(UserError, match="unknown calibration 'a100'"):
        load_calibration("a100+200g-per-node")


def test_calibrations_of_several_types_are_joined(tmp_path):
    names = ("a100-80g-derived", "h100-80g-derived")
    slow, fast = map(load_calibration, names)
    found = load_calibration(",".join(names))
    assert found.devices == {**slow.devices, **fast.devices} and found.name == ",".join(names)
    assert (found.inside, found.between, found.host) == (slow.inside, slow.between, slow.host)
    assert found.inside.bytes_per_s < fast.inside.bytes_per_s and found.sources == slow.sources == fast.sources
    assert found.pipelined_prefill and slow.provenance in found.provenance and fast.provenance in found.provenance
    (tmp_path / "mine.json").write_text(SMALLEST.replace('"latency_s": 0', '"latency_s": 3'), encoding="utf-8")
    mixed = load_calibration(f"{tmp_path}/mine.json,{names[0]}+200g-per-node")
    assert (mixed.inside.bytes_per_s, mixed.inside.latency_s, mixed.between.latency_s) == (1, 3, 1e-5)
    assert not mixed.pipelined_prefill and mixed.sources["layer_s"] == "derived"
    (tmp_path / "a,b.json").write_text(SMALLEST, encoding="utf-8")
    assert load_calibration(str(tmp_path / "a,b.json")).name == "a,b"
    with pytest.raises(UserError, match="two of the calibrations know a100-80g; name one for each"):
        load_calibration("a100-80g,a100-80g-derived")
