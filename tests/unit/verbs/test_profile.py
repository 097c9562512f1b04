"""The profile verb writes what was measured."""

import json
from dataclasses import replace

import pytest

from rlhf_spmd.command_line.arguments import parse
from rlhf_spmd.machines.calibration_file import load_calibration, read_calibration
from rlhf_spmd.runtime.world.world import World
from rlhf_spmd.verbs import profile as verb


@pytest.fixture
def world():
    world = World.discover()
    yield world
    world.shutdown()


def test_the_file_holds_what_was_measured(world, tmp_path, monkeypatch, capsys):
    measured = replace(load_calibration("cpu-2core"), name="mine")
    monkeypatch.setattr(verb, "profile", lambda world, config, *, name: replace(measured, name=name))
    words = ["profile", "--preset", "tiny", "--out", str(tmp_path / "mine.json")]
    verb.run(world, parse(words))
    assert read_calibration(str(tmp_path / "mine.json")) == measured
    assert json.loads(capsys.readouterr().out.split("\n")[-2])["calibration"] == str(tmp_path / "mine.json")
