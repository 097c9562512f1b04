"""Clocks of the profile: processor seconds and idle time."""

import dataclasses

import pytest

from rlhf_spmd.runtime.profile import clock as clock_module
from rlhf_spmd.runtime.profile.clock import Clock


@pytest.mark.timed
def test_a_clock_tells_processor_seconds_of_what_takes_turns():
    """Sleeping takes none, adding up does, and twice as much takes twice as long."""
    import time

    class Alone:
        def allgather(self, value, what):
            return [value]

    order = []
    works = [lambda: time.sleep(0.02), lambda: sum(range(300_000)), lambda: order.append(len(order))]
    clock = Clock(Alone(), 1, lambda: None, lambda: None, budget_s=0.2)
    slept_s, added_s, _ = clock.seconds(*works)
    assert slept_s < 0.01 and added_s > 2e-4 and len(order) >= 4
    wall_s, _, _ = dataclasses.replace(clock, num_workers=None).seconds(*works)
    assert wall_s >= 0.02


@dataclasses.dataclass
class PlantedTime:
    """Stands in for the module `time`: works advance it by the seconds that they are said to take."""

    elapsed_s: float = 0.0
    processor_s: float = 0.0

    def perf_counter(self) -> float:
        return self.elapsed_s

    def process_time(self) -> float:
        return self.processor_s

    def sleep(self, seconds: float) -> None:
        self.elapsed_s += seconds

    def compute(self, seconds: float) -> None:
        self.elapsed_s += seconds
        self.processor_s += seconds


def test_a_clock_adds_idle_time_where_ranks_wait_for_each_other(monkeypatch):
    """Two ranks on one processor: half of the seconds by the clock, in proportion to what each work computes."""

    class Alone:
        def allgather(self, value, what):
            return [value]

    planted = PlantedTime()
    monkeypatch.setattr(clock_module, "time", planted)
    works = [lambda: planted.sleep(0.02), lambda: planted.compute(0.001), lambda: planted.compute(0.003)]
    clock = Clock(Alone(), 1, lambda: None, lambda: None, budget_s=0.2)
    # 24 ms by the clock, half of them for this rank: 4 ms are computed, 8 ms idle, of which a quarter goes to the first
    assert clock.seconds(*works, together=2) == pytest.approx((0.0, 0.001 + 0.002, 0.003 + 0.006))
    assert clock.seconds(*works) == pytest.approx((0.0, 0.001, 0.003))  # alone: processor seconds
    by_elapsed = dataclasses.replace(clock, num_workers=None)
    assert by_elapsed.seconds(*works, together=2) == pytest.approx((0.02, 0.001, 0.003))
