"""Process groups of our own: tensors through host memory give what gloo gives, and the stand-in for NCCL executes in
order what a rank gives to a communicator, so that what would hang on NCCL hangs there.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rlhf_spmd.runtime.world import host_group
from rlhf_spmd.runtime.world.groups import connect_pairs
from tests import backends
from tests.ordered_group import OrderedGroup, batch_isend_irecv

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.slow_at(4, 8),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]
QUICK, LONG = timedelta(seconds=1.5), timedelta(seconds=30)


@pytest.fixture
def ordered(monkeypatch):
    """Does what tests/backends.py does for a whole launch."""
    if "ORDERED" not in dist.Backend._plugins:
        dist.Backend.register_backend("ordered", OrderedGroup, devices=["cpu"])
    monkeypatch.setattr(dist, "batch_isend_irecv", batch_isend_irecv)


def two_ranks(world, backend: str | None = None, timeout: timedelta = LONG):
    """Returns a new group of ranks 0 and 1, None on the others; every rank calls it."""
    host_group.register()
    group = dist.new_group([0, 1], backend=backend, timeout=timeout)
    return group if world.rank < 2 else None


def results(rank: int, group) -> list[torch.Tensor]:
    """Returns what each kind of operation leaves on a rank."""
    mine = torch.arange(6.0).view(2, 3).T + 10 * rank  # not contiguous
    summed, told, sent = mine.clone(), mine.clone(), mine.contiguous()
    whole, part, arrived = torch.zeros(6, 2), torch.zeros(1, 3), torch.zeros(3, 2)
    parts = [torch.zeros(3, 2) for _ in range(2)]
    work = dist.all_reduce(summed, group=group, async_op=True)
    work.wait()
    dist.broadcast(told, src=1, group=group)
    dist.all_gather_into_tensor(whole, sent, group=group)
    dist.all_gather(parts, sent, group=group)
    dist.reduce_scatter_tensor(part, torch.arange(6.0).view(2, 3) + rank, group=group)
    most = torch.tensor([rank, 5 - rank])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    ends = [dist.P2POp(dist.isend, sent, 1 - rank, group=group), dist.P2POp(dist.irecv, arrived, 1 - rank, group=group)]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    dist.barrier(group=group)
    return [summed, told, whole, *parts, part, most, arrived]


def test_tensors_on_a_device_travel_through_host_memory(world, monkeypatch):
    plain, ours = two_ranks(world, "gloo"), two_ranks(world, host_group.BACKEND)
    if plain is None:
        return
    expected = results(world.rank, plain)
    monkeypatch.setattr(host_group, "_on_host", backends._copied)  # as if they lay on a device
    found = results(world.rank, ours)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert not torch.equal(expected[0], expected[1])


def test_a_communicator_carries_out_one_operation_after_another(world, ordered):
    """Both ranks receive first: their sends wait behind it. In two communicators nothing waits behind anything."""
    group, other = two_ranks(world, "ordered", QUICK), two_ranks(world, "ordered", QUICK)
    if group is None:
        return
    connect_pairs({"one": group, "other": other}, {"one": [(0, 1)], "other": [(0, 1)]}, "cpu")
    number, peer = torch.tensor([world.rank]), 1 - world.rank
    first, second = (group, other) if world.rank == 0 else (other, group)
    arriving = dist.irecv(arrived := torch.zeros(1, dtype=torch.int64), peer, group=first)
    dist.isend(number, peer, group=second).wait()
    arriving.wait()
    assert arrived.item() == peer
    arriving = dist.irecv(arrived, peer, group=group)
    leaving = dist.isend(number, peer, group=group)
    with pytest.raises(RuntimeError, match=rf"receive from {peer}"):
        arriving.wait()
    assert not leaving.is_completed() or leaving.error


def test_a_batch_travels_side_by_side_and_tags_mean_nothing(world, ordered):
    group = two_ranks(world, "ordered")
    if group is None:
        return
    peer = 1 - world.rank
    sent, arrived = torch.tensor([world.rank]), torch.zeros(1, dtype=torch.int64)
    ends = [dist.P2POp(dist.irecv, arrived, peer, group=group), dist.P2POp(dist.isend, sent, peer, group=group)]
    (work,) = dist.batch_isend_irecv(ends)
    work.wait()
    assert arrived.item() == peer
    if world.rank == 0:
        for number in (1, 2):
            dist.send(torch.tensor([number]), 1, group=group, tag=number)
    else:
        for number, tag in ((1, 2), (2, 1)):
            dist.recv(arrived, 0, group=group, tag=tag)
            assert arrived.item() == number


def test_a_send_ends_when_its_receive_has_begun(world, ordered):
    group = two_ranks(world, "ordered")
    if group is not None:
        connect_pairs({"one": group}, {"one": [(0, 1)]}, "cpu")
        number = torch.zeros(1, dtype=torch.int64)
        leaving = dist.isend(number, 1, group=group) if world.rank == 0 else None
        assert leaving is None or not leaving.over.wait(0.3)
    world.barrier("the receive")
    if group is not None and world.rank == 0:
        leaving.wait()
    elif group is not None:
        dist.recv(number, 0, group=group)


def test_a_first_message_blocks_the_host(world, ordered):
    """Two ranks that begin with different communicators wait for each other before they post."""
    group, other = two_ranks(world, "ordered", QUICK), two_ranks(world, "ordered", QUICK)
    if group is None:
        return
    first = group if world.rank == 0 else other
    with pytest.raises(RuntimeError):
        dist.irecv(torch.zeros(1), 1 - world.rank, group=first)
