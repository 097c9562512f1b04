"""The thread that detects hangs survives failures around it, and does not take a thread that spins for work."""

import os
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rlhf_spmd.runtime.failure.processes import LIBC, PR_SET_NAME, process_fields
from rlhf_spmd.runtime.failure.records import Record
from rlhf_spmd.runtime.failure.watch import Watch
from rlhf_spmd.runtime.world.devices import VisibleDevice, choose_devices


class Alone:
    """The world of one rank, as far as a watch looks at it."""

    rank, size, hosts, nodes, node = 0, 1, ("here",), (0,), 0
    deadline_s, is_meeting = 0.1, False
    chosen = choose_devices("cuda", [[VisibleDevice("device", "H100", 8 << 30)]], "", (0,), ("here",))

    def __init__(self):
        self.record, self.spoken = Record.create(), 0
        self.positions = types.SimpleNamespace(report=self.report)

    def report(self, **_):
        self.spoken += 1


def spoke_again(world: Alone) -> bool:
    before, until = world.spoken, time.monotonic() + 60
    while world.spoken < before + 2 and time.monotonic() < until:
        time.sleep(0.01)
    return world.spoken >= before + 2


def test_it_never_asks_torch(monkeypatch):
    """A module is in sys.modules before it has its attributes; and what torch holds is asked for under a lock that a
    rank which hangs may have."""
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    world = Alone()
    watch = Watch(world)
    watch.start()
    try:
        assert spoke_again(world)
    finally:
        watch.stop()


@contextmanager
def used_by_a_thread(name: bytes, seconds: float) -> Iterator[None]:
    """Runs a thread of this name inside this context that has used its processor for so long."""
    has_spun, over = threading.Event(), threading.Event()

    def spin() -> None:
        LIBC.prctl(PR_SET_NAME, name)
        while time.thread_time() < seconds:
            pass
        has_spun.set()
        over.wait()

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        assert has_spun.wait(60)
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("name", "counts"),
    [(b"NCCL Progress 1", False), (b"pt_nccl_watchdg", False), (b"cuda-EvtHandlr", False), (b"a (NCCL) :)", True)],
)
def test_what_waits_for_a_peer_is_not_at_work(name, counts):
    """A rank that waits in NCCL for another node keeps a processor busy. Other threads of the tests add to what is
    seen, so a few attempts may fail."""
    assert (counts, counts) in (seen_work(name, 0.6) for _ in range(5))


def test_a_loop_of_gloo_is_at_work_if_it_carries_a_message():
    """It wakes up a hundred times a second while it waits, which takes some milliseconds of each second."""
    assert (False, False) in (seen_work(b"gloo_tcp_loop", 0.6) for _ in range(5))  # of 100 s
    assert (True, False) in (seen_work(b"gloo_tcp_loop", 0.6, ago_s=10.0) for _ in range(5))


def seen_work(name: bytes, used_s: float, ago_s: float = 100.0) -> tuple[bool, bool]:
    """Returns whether the watch, and the fields of the process, count the seconds of a thread of this name.

    ago_s: since the last activity.
    """
    world = Alone()
    world.deadline_s = 30.0  # of which a hundredth is work
    watch = Watch(world)
    watch._update()
    watch._active -= ago_s
    before_s = process_fields(os.getpid())[1]
    with used_by_a_thread(name, used_s):
        is_at_work = watch._update() < ago_s / 2
        return is_at_work, process_fields(os.getpid())[1] - before_s > used_s / 2
