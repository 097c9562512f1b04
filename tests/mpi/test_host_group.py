"""Process groups of our own: tensors through host memory give what gloo gives."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rlhf_spmd.runtime.world import host_group
from tests import backends

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.slow_at(4),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]
LONG = timedelta(seconds=30)


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
