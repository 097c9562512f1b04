"""Fixtures of the profile's tests."""

from collections.abc import Iterator

import pytest

from rlhf_spmd.runtime.world.world import World


@pytest.fixture
def world() -> Iterator[World]:
    """Yields the world of a program that was started without mpirun."""
    world = World.discover()
    world.use_device("auto")
    yield world
    world.shutdown()
