"""The probe: no longer than it may take, only where a calibration was made elsewhere, and its factors are ratios."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster, Node
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.runtime.profile import calibration_probe
from rlhf_spmd.runtime.profile.calibration_probe import at_hand
from rlhf_spmd.runtime.profile.machine import machines
from rlhf_spmd.runtime.world.world import World

TINY = presets.load("tiny")
SHIPPED = load_calibration("cpu-2core")


class FakeTime:
    """A clock on which only what it is told to do takes time; half of it with a processor."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.now / 2

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> FakeTime:
    found = FakeTime()
    monkeypatch.setattr(calibration_probe, "time", found)
    return found


@pytest.fixture
def world() -> Iterator[World]:
    """Yields one rank, with torch started."""
    found = World.discover()
    found.use_device("auto")
    program = demo()
    found.start_torch(program.groups, program.pairs, threads=1)
    yield found
    found.shutdown()


def demo() -> Program:
    return load_strategy("flattening").compile(make_workload(TINY), Cluster((Node(1),)), {})


@pytest.mark.timed
def test_a_calibration_from_elsewhere_is_scaled(world, monkeypatch):
    for limit_s in (0.8, 8.0, 60.0):  # a busy machine needs longer
        monkeypatch.setattr(calibration_probe, "LIMIT_S", limit_s)
        found = at_hand(world, TINY, demo(), SHIPPED, trained_s=10 * limit_s)
        if found.scale:
            break
    assert found.given is SHIPPED and found.why_not == ""
    assert 0 < found.scale.num_workers <= 1.01
    for kind in ("inference", "training", "generation"):
        assert 0.1 < getattr(found.scale, kind) < 20
    ratio = found.calibration.devices["cpu"].layer_s / SHIPPED.devices["cpu"].layer_s
    assert ratio == pytest.approx(found.scale.inference)


def refuse(*_, **__):
    raise RuntimeError("a probe")


def test_a_calibration_that_was_made_here_stays(world, monkeypatch):
    monkeypatch.setattr(calibration_probe, "measure_pieces", refuse)
    here = machines(world)[0]
    given = replace(SHIPPED, machine=here)
    found = at_hand(world, TINY, demo(), given, trained_s=8.0)
    assert found.calibration is given and found.scale is None and found.why_not == ""
    for other in (None, replace(here, threads=2), replace(here, cores=here.cores / 2), replace(here, details="")):
        with pytest.raises(RuntimeError, match="a probe"):
            at_hand(world, TINY, demo(), replace(given, machine=other), trained_s=8.0)
