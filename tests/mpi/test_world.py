"""The world on real ranks: discovery, control messages, deadlines, leaving together, and process groups.

    python tests/run_mpi.py 2 4 5 8 -- tests/mpi/test_world.py

Ten seconds beside the start-up. Jobs that end by failing are in tests/e2e/test_world_failures.py.
"""

import atexit
import dataclasses
import socket
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.world import world as world_module
from rlhf_spmd.runtime.world.control_messages import INLINE, Control
from rlhf_spmd.runtime.world.world import DeadlineError

pytestmark = pytest.mark.mpi(min_size=2)
DEADLINE_S = 0.8


def second_world(world, deadline_s=DEADLINE_S):
    """Returns the same ranks with control messages of their own, which a test may leave in pieces."""
    control = Control(world.control.comm.Dup(), world.record, deadline_s=deadline_s)
    control.positions = world.positions
    return dataclasses.replace(world, control=control)


def settle(world, other):
    """Lets what an expired deadline left unfinished finish, now that the late ranks have come too."""
    world.barrier()
    start = time.monotonic()
    while not all([request.Test() for request, _ in other.control.unfinished]):
        assert time.monotonic() - start < 20
        time.sleep(1e-3)
    world.barrier()


# Discovery


def test_discovery_is_one_picture(world):
    own = [world.rank, world.size, world.node, world.num_nodes, socket.gethostname()]
    pictures = world.allgather(own)
    assert [picture[0] for picture in pictures] == list(range(world.size))
    assert {picture[1] for picture in pictures} == {world.size}
    assert tuple(picture[2] for picture in pictures) == world.nodes
    assert tuple(picture[4] for picture in pictures) == world.hosts
    assert world.num_nodes == len(set(world.nodes))
    firsts = [world.nodes.index(node) for node in range(world.num_nodes)]
    assert firsts == sorted(firsts)  # nodes are numbered by their lowest rank


# Control messages


@pytest.mark.parametrize("length", [0, 1, INLINE - 3, INLINE - 2, INLINE - 1, 5_000, 300_000])
def test_messages_of_any_length_and_unequal_ones(world, length):
    assert world.allgather("x" * length) == ["x" * length] * world.size
    unequal = ["x" * (length * rank // world.size) for rank in range(world.size)]
    assert world.allgather(unequal[world.rank]) == unequal
    root = world.size - 1
    assert world.bcast("y" * length if world.rank == root else None, root=root) == "y" * length


def test_barrier_waits_for_all(world, shared_folder):
    world.barrier()
    if world.rank == 0:
        time.sleep(0.2)
        (shared_folder / "arrived").touch()
    world.barrier()
    assert (shared_folder / "arrived").exists()


def test_agree(world):
    world.agree("the configuration", {"seed": "1", "text": "z" * 10_000})
    wrong = world.size - 1
    mine = {"seed": "1", "text": "z" * 10_000, "fine": ""}
    if world.rank == wrong:
        mine |= {"seed": "2", "text": "z" * 9_999}
    with pytest.raises(UserError) as caught:
        world.agree("the configuration", mine)
    text = str(caught.value)
    assert "the configuration: seed is not the same" in text and "'2' on rank 1".replace("1", str(wrong)) in text
    assert len(set(world.allgather(text))) == 1
    with pytest.raises(UserError, match="extra is not the same.*missing on"):
        world.agree("options", {"extra": ""} if world.rank == 0 else {})


# Deadlines


@pytest.mark.timed
@pytest.mark.rotates
def test_expiry_names_the_late_rank_and_what_it_did(world):
    late, other = world.size - 1, second_world(world)
    if world.rank == late:
        world.progress("iteration 3: asleep")
        time.sleep(3 * DEADLINE_S)
        other.barrier("the stop decision")  # all others are waiting in it still, as far as MPI knows
    else:
        start = time.monotonic()
        with pytest.raises(DeadlineError) as caught:
            other.barrier("the stop decision")
        assert DEADLINE_S <= time.monotonic() - start < 3 * DEADLINE_S
        text = str(caught.value)
        assert text.startswith(f"the stop decision: rank {world.rank} (host {world.hosts[world.rank]}) waited ")
        assert f"rank {late} (host {world.hosts[late]}) did not arrive" in text
        assert f"rank {late} last reported: iteration 3: asleep" in text
    settle(world, other)


# Leaving together


@pytest.fixture
def no_end():
    yield
    atexit.unregister(world_module._end_job)


def leave(world, block, capfd):
    """Runs `block(rank)` in together; returns the exit status, and what each rank printed on stderr."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as caught, world.together("reading the configuration"):
        block(world.rank)
    return caught.value.code, world.allgather(capfd.readouterr().err)


def test_a_mistake_on_one_rank_names_it(world, capfd, no_end):
    def block(rank):
        if rank == world.size - 1:
            raise UserError("no such file: a.json" + "x" * 1000)

    status, printed = leave(world, block, capfd)
    assert status == 2 and printed[:-1] == [""] * (world.size - 1)
    assert printed[-1].startswith("rlhf_spmd: error: no such file: a.json")
    assert printed[-1].endswith(f" (on rank {world.size - 1} (host {world.hosts[-1]}) of {world.size})\n")


def test_a_programming_error_shows_one_traceback(world, capfd, no_end):
    def block(rank):
        if rank == 0:
            raise UserError("only a consequence")
        raise KeyError("wrong key")

    status, printed = leave(world, block, capfd)
    assert status == 1
    assert printed[0].count("Traceback") == 1 and "KeyError: 'wrong key'" in printed[0]
    assert printed[1:] == [""] * (world.size - 1)


# Process groups


def test_sums_in_groups_of_odd_shapes(world, named_ranks, make_group):
    for name, ranks in named_ranks.items():
        if world.rank in ranks:
            number = torch.tensor([float(2**world.rank)])
            group = world.group(name)
            assert (group is None) == (len(ranks) == 1)
            if group is not None:
                distributed.all_reduce(number, group=group)
            assert number.item() == sum(2**rank for rank in ranks)
        elif len(ranks) > 1:
            with pytest.raises(AssertionError, match="is not in group"):
                world.group(name)
    communicators = [world.group("the_same"), world.group("all"), distributed.group.WORLD]  # three, of the same ranks
    assert len(set(map(id, communicators))) == 3
    assert distributed.get_world_size(make_group((0, 1))) in (2, -1)


@pytest.mark.timed
@pytest.mark.rotates
def test_stragglers_of_a_torch_collective(world):
    late, position = world.size - 1, "iteration 7: all_reduce"
    group = distributed.new_group(timeout=timedelta(seconds=1))
    world.progress("iteration 6: all_reduce", 6, 2)
    needs = tuple((rank, 2, 0) for rank in range(world.size))
    if world.rank == late:
        time.sleep(2.5)
    else:
        world.progress(position, 7, 2)
        with pytest.raises(RuntimeError):
            distributed.all_reduce(torch.ones(1), group=group)
        assert world.stragglers(needs, 7) == {late: "iteration 6: all_reduce"}
        assert world.stragglers(((world.rank, 2, 0),), 7) == {}
    world.barrier()
    if world.rank == late:
        world.progress(position, 7, 2)
    world.progress("iteration 8: all_reduce", 8, 2)
    world.barrier()
    assert world.stragglers(needs, 7) == {}  # who has gone on is not late


def test_an_end_that_looks_like_success_is_an_error():
    """A launcher would believe Abort(0), and a chain of jobs would go on without a model."""
    communicator = world_module._load_mpi().COMM_WORLD
    for status in (0, 256):
        with pytest.raises(UserError, match=rf"it called Abort\({status}\) of an MPI communicator.*raise an exception"):
            communicator.Abort(status)
