"""The communicators of a rehearsal work strictly in order, each for itself, and a wrong partner is noticed."""

import time

import numpy as np
import pytest

from rlhf_spmd.runtime.rehearse.communicators import Communicators, Operation, Part

pytestmark = [pytest.mark.mpi(min_size=3), pytest.mark.ranks(4)]


@pytest.fixture
def communicators(world) -> Communicators:
    return Communicators(world.messages(), ["one", "other"], lambda: None)


def message(name: int, peer: int, numbers=(), *, sends: bool, seconds: float = 0.0) -> Operation:
    return Operation([Part(name, peer, sends, seconds, np.array(numbers, float))])


def test_a_message_waits_for_the_one_before_it(world, communicators):
    """Rank 0 sends to rank 1, then to rank 2; while rank 1 does not receive, neither does rank 2."""
    started = []
    if world.rank == 0:
        started = [communicators.start("one", message(peer, peer, [peer], sends=True)) for peer in (1, 2)]
        started.append(communicators.start("other", message(3, 2, [3], sends=True)))
    if world.rank == 2:
        started = [communicators.start("one", message(2, 0, [0], sends=False))]
        started.append(communicators.start("other", message(3, 0, [0], sends=False)))
        communicators.finish(started[1])
        assert started[1].parts[0].numbers.tolist() == [3]
    for _ in range(20):
        communicators.advance()
        time.sleep(0.001)
    assert [one.is_over for one in started[:2]] == [False, False][: len(started)] or world.rank == 2
    assert world.rank != 2 or not started[0].is_over
    world.barrier("nobody has received")
    if world.rank == 1:
        started = [communicators.start("one", message(1, 0, [0], sends=False))]
    for one in started:
        communicators.finish(one)
    if world.rank in (1, 2):
        assert started[0].parts[0].numbers.tolist() == [world.rank]


def test_a_meeting_takes_as_long_as_its_slowest_rank(world, communicators):
    meeting = Operation(name=1, members=(0, 1, 3), seconds=0.01 * world.rank)
    began_s = time.monotonic()
    if world.rank != 2:
        communicators.finish(communicators.start("one", meeting))
        assert time.monotonic() - began_s >= 0.03
    assert len(set(world.allgather(meeting.end_s, "ends")) - {None}) == 1


def test_ranks_that_meet_elsewhere_do_not_go_on(world, communicators):
    meeting = communicators.start("one", Operation(name=world.rank // 3, members=(0, 1, 2, 3)))
    for _ in range(50):
        communicators.advance()
        time.sleep(0.001)
    assert not meeting.is_over
    world.barrier("all have tried")
