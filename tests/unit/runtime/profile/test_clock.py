"""Clocks of the profile: processor seconds and idle time."""

import dataclasses

import pytest

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
