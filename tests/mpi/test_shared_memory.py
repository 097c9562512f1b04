"""Shared memory of the ranks of one machine: without room there is none, and its parts are the same memory.

python tests/run_mpi.py 2 4 5 8 -- tests/mpi/test_shared_memory.py
"""

import os

import pytest

from rlhf_spmd.runtime.weights import shared_memory as arena_file
from rlhf_spmd.runtime.weights.shared_memory import Arena
from tests.run_mpi import BACKEND

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(BACKEND in os.environ, reason="shared memory is for gloo only"),
]


def test_without_room_there_is_no_shared_memory(world, monkeypatch):
    """More than the machine has: everybody goes without, nobody crashes, nothing is left behind."""
    before = set(os.listdir(arena_file.SHARED_MEMORY))
    assert Arena.make(world, 2**45 if world.rank == 0 else 100) is None
    assert Arena.make(world, 0) is None
    world.barrier("the files")
    left = set(os.listdir(arena_file.SHARED_MEMORY)) - before
    assert not [name for name in left if name.startswith("rlhf_spmd_")]
    monkeypatch.setattr(arena_file, "SHARED_MEMORY", "/nowhere")
    assert Arena.make(world, 100) is None
