"""How a rank ends a job. Worlds of several ranks: tests/mpi/test_world.py, tests/e2e/test_world_failures.py."""

import os
import socket
import sys
from types import SimpleNamespace

import pytest

from rlhf_spmd.runtime.failure.records import Record
from rlhf_spmd.runtime.world import world
from tests.run_mpi import LAUNCHER_MARKS


@pytest.mark.parametrize(
    ("launched", "size", "aborts"),
    [
        ({"PMI_SIZE": "1"}, 1, False),
        ({"PMI_SIZE": "2"}, 2, True),
        ({"PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "PMI_FD": "{socket}"}, 1, True),  # mpiexec -n 1 of MPICH
        ({}, 2, True),  # by a launcher that is not known
    ],
)
def test_who_is_alone_ends_without_an_abort(launched, size, aborts, monkeypatch):
    """At once: to wait, and to load MPI to abort, took longer than all else that a wrong option takes."""
    for name in [name for name in os.environ if name.startswith(LAUNCHER_MARKS)]:
        monkeypatch.delenv(name)
    (read, write), (mine, other) = os.pipe(), socket.socketpair()
    for name, value in ({"PMI_RANK": "0"} | launched).items():
        monkeypatch.setenv(name, value.format(socket=mine.fileno()))
    mpi = SimpleNamespace(COMM_WORLD=SimpleNamespace(size=size), Is_finalized=lambda: False)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    monkeypatch.setattr(world, "FORWARD_S", 0)
    monkeypatch.setattr(world.faulthandler, "dump_traceback_later", lambda *_, **__: None)  # its thread is pytest's
    monkeypatch.setattr(world, "_load_mpi", lambda: os.write(write, b"aborts"))
    if (child := os.fork()) == 0:
        world._end_job(3, Record.create())
    os.close(write)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert os.read(read, 100) == (b"aborts" if aborts else b"")
    os.close(read)
    mine.close()
    other.close()
