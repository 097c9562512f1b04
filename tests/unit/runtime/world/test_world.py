"""How a rank ends a job. Worlds of several ranks: tests/mpi/test_world.py, tests/e2e/test_world_failures.py."""

import mmap
import os

import pytest

from rlhf_spmd.runtime.observe.flight_recorder import SIZE, Flight
from rlhf_spmd.runtime.world import world
from tests.run_mpi import LAUNCHER_MARKS


@pytest.mark.parametrize(("launched", "did"), [("1", b""), ("2", b"waits, aborts")])
def test_only_a_job_of_a_launcher_is_aborted(launched, did, monkeypatch):
    """A rank alone ends at once: to wait and to load MPI took longer than all else that a wrong option takes."""
    for name in [name for name in os.environ if name.startswith(LAUNCHER_MARKS)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PMI_SIZE", launched)
    monkeypatch.setenv("PMI_RANK", "0")
    read, write = os.pipe()
    monkeypatch.setattr(world.time, "sleep", lambda _: os.write(write, b"waits, "))
    monkeypatch.setattr(world.faulthandler, "dump_traceback_later", lambda *_, **__: None)  # its thread is pytest's
    monkeypatch.setattr(world, "_load_mpi", lambda: os.write(write, b"aborts"))
    if (child := os.fork()) == 0:
        world._end_job(3, Flight(mmap.mmap(-1, SIZE)))
    os.close(write)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert os.read(read, 100) == did
    os.close(read)
