"""Reallocation on real ranks: the bits that arrive, the bytes and messages that travel, the memory it takes.

    python tests/run_mpi.py 2 4 5 8 -- tests/mpi/test_weight_mover.py

Five seconds beside the start-up.
"""

import os

import pytest
import torch

from rlhf_spmd.plan.program.reallocate import plan_reallocation
from rlhf_spmd.plan.program.tensors import Holding, weights_of
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.runtime.weights.shared_memory import Arena
from rlhf_spmd.runtime.weights.weight_mover import Mover
from tests.reallocations import local_shapes, sent_bytes, sent_messages
from tests.run_mpi import BACKEND, NUM_RANKS

pytestmark = pytest.mark.mpi(min_size=2)

SHAPE = ModelShape(3, 12, 19, 8, 4, 2, 29, qkv_bias=True, qk_norm=True)
LARGE = ModelShape(2, 512, 1000, 8, 4, 64, 1001)  # blocks large enough to travel without packing
WIDTHS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
ALL_AT_ONCE = 2**40

PAIRS = {  # name -> ranks, dp, pp, tp before and after
    "tp2 -> dp2": (((0, 1), 1, 1, 2), ((0, 1), 2, 1, 1)),
    "pp2 -> tp2, backwards": (((0, 1), 1, 2, 1), ((1, 0), 1, 1, 2)),
    "one -> two": (((1,), 1, 1, 1), ((0, 1), 2, 1, 1)),
    "tp3 -> tp4": (((2, 0, 1), 1, 1, 3), ((0, 1, 2, 3), 1, 1, 4)),
    "dp2 tp2 -> pp3": (((0, 1, 2, 3), 2, 1, 2), ((3, 1, 0), 1, 3, 1)),
    "tp4 -> dp4": (((0, 1, 2, 3), 1, 1, 4), ((0, 1, 2, 3), 4, 1, 1)),
    "dp4 -> tp4": (((0, 1, 2, 3), 4, 1, 1), ((0, 1, 2, 3), 1, 1, 4)),
    "pp2 tp2 -> the fifth": (((0, 1, 2, 3), 1, 2, 2), ((4,), 1, 1, 1)),
    "dp2 pp2 tp2 -> dp4 tp2": ((tuple(range(8)), 2, 2, 2), (tuple(range(8)), 4, 1, 2)),
    "tp4 -> tp3 elsewhere": (((0, 1, 2, 3), 1, 1, 4), ((6, 4, 5), 1, 1, 3)),
}


def pairs(*names):
    """Returns the names, each at the number of ranks of the smallest launch that has enough: others only look on."""
    found = []
    for name in names:
        last = max(*PAIRS[name][0][0], *PAIRS[name][1][0])
        found.append(pytest.param(name, marks=pytest.mark.ranks(min(size for size in NUM_RANKS if size > last))))
    return found


def grids(name):
    before, after = PAIRS[name]
    return grid(*before), grid(*after)


def grid(ranks, dp, pp, tp):
    places = [(stage, index) for _ in range(dp) for stage in range(pp) for index in range(tp)]
    return [(rank, Shard(stage, pp, index, tp)) for rank, (stage, index) in zip(ranks, places, strict=True)]


def whole_model(shape, dtype):
    """Makes a model whose bits are unlike any other, as far as the width allows; the same on every rank."""
    generator, model = torch.Generator().manual_seed(7), {}
    for name, size in local_shapes(shape, Holding(Shard())).items():
        model[name] = torch.randint(0, 2**15, size, generator=generator).to(WIDTHS[dtype]).view(dtype)
    return model


def cut(shape, model, holding):
    """Returns the tensors of one holding, cut from the whole model; flat and padded under ZeRO 3."""
    found = {}
    for weight in weights_of(shape):
        box = weight.box(holding.shard)
        if box is None:
            continue
        layers, rows, columns = box
        for _, name in weight.parameters(layers):
            piece = model[name][(slice(*rows), slice(*columns))[: weight.num_dims]].contiguous()
            if holding.parts > 1:
                start, stop = holding.interval(box)
                piece = torch.cat([piece.view(-1)[start:stop], piece.new_ones(3)])
            found[name] = piece
    return found


WAYS = ["sockets"] if BACKEND in os.environ else ["sockets", "shared memory"]  # for gloo only (tests/backends.py)


@pytest.fixture(scope="module", params=WAYS, autouse=True)
def arena(world, request):
    """Runs every test both ways."""
    found = Arena.make(world, 64 * 2**20) if request.param == "shared memory" else None
    assert (found is None) == (request.param == "sockets")
    ARENAS[:] = [found]
    yield found
    ARENAS.clear()


ARENAS: list[Arena | None] = []


def run(world, shape, sources, targets, *, dtype=torch.float32, bucket_bytes=ALL_AT_ONCE, source=None, tag_base=0):
    """Carries a reallocation out and checks it against the plan and the whole model; returns the targets' tensors."""
    plan = plan_reallocation(
        shape, sources, targets, bytes_per_number=dtype.itemsize, node_of=lambda rank: 0, whole_bytes=0
    )
    model, rank = whole_model(shape, dtype), world.rank
    if source is None and rank in sources:
        source = cut(shape, model, sources[rank])
    shards = [shard for owner, shard in targets if owner == rank]
    made = [
        {name: torch.zeros(size, dtype=dtype) for name, size in local_shapes(shape, Holding(shard)).items()}
        for shard in shards
    ]
    if rank in plan.ranks:
        options = {"bucket_bytes": bucket_bytes, "tag_base": tag_base, "device": "cpu", "arena": ARENAS[0]}
        mover = Mover(plan, rank, source, made, **options)
        assert all(part.shared == (ARENAS[0] is not None) for part in mover.parts)
        mover.start()
        assert all((tensor == 0).all() for tensors in made for tensor in tensors.values()), "targets changed too soon"
        mover.finish()
        assert mover.num_bytes_sent == sent_bytes(plan)[rank]
        assert mover.num_messages_sent == sent_messages(plan, bucket_bytes)[rank]
        assert mover.peak_extra_bytes <= plan.extra_bytes(bucket_bytes)[rank]
        assert mover.peak_extra_bytes <= 2 * max(bucket_bytes, dtype.itemsize * len(mover.parts))
        assert not any(part.buffers or part.tensors for part in mover.parts)
    for shard, tensors in zip(shards, made, strict=True):
        for name, expected in cut(shape, model, Holding(shard)).items():
            assert torch.equal(tensors[name].view(WIDTHS[dtype]), expected.view(WIDTHS[dtype])), (name, shard)
    return made


def plain(shards):
    return {rank: Holding(shard) for rank, shard in shards}


@pytest.mark.parametrize("bucket_bytes", [64, pytest.param(1000, marks=pytest.mark.slow), ALL_AT_ONCE])
@pytest.mark.parametrize("name", pairs(*PAIRS))
def test_pairs(world, name, bucket_bytes):
    before, after = grids(name)
    run(world, SHAPE, plain(before), after, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("name", pairs("tp2 -> dp2", "tp3 -> tp4", "dp2 pp2 tp2 -> dp4 tp2"))
@pytest.mark.parametrize("bucket_bytes", [2**20, 2**23])
def test_large_blocks_travel_without_packing(world, name, bucket_bytes):
    before, after = grids(name)
    run(world, LARGE, plain(before), after, bucket_bytes=bucket_bytes)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_widths(world, dtype):
    before, after = grids("tp2 -> dp2")
    run(world, SHAPE, plain(before), after, dtype=dtype, bucket_bytes=500)


@pytest.mark.parametrize("shape", [SHAPE, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("tp", [1, 2])
def test_from_zero_3(world, shape, tp):
    """Each weight's slice lies flat in parts over dp."""
    dp = world.size // tp
    shards = grid(range(dp * tp), dp, 1, tp)
    sources = {rank: Holding(shard, place // tp, dp) for place, (rank, shard) in enumerate(shards)}
    run(world, shape, sources, grid(range(world.size), world.size, 1, 1), bucket_bytes=2**20)
    run(world, shape, sources, grid((1, 0), 1, 1, 2), bucket_bytes=2**20)


@pytest.mark.parametrize("name", pairs("pp2 -> tp2, backwards", "dp2 tp2 -> pp3", "pp2 tp2 -> the fifth"))
def test_there_and_back(world, name):
    """The second reallocation begins with what the first one made."""
    before, after = grids(name)
    made = run(world, SHAPE, plain(before), after, bucket_bytes=2000)
    run(world, SHAPE, plain(after), before, bucket_bytes=2000, source=made[0] if made else None)


@pytest.mark.ranks(2)
def test_several_at_once(world):
    """Two reallocations under way together, finished in the order in which they started."""
    model, movers, made = whole_model(SHAPE, torch.float32), [], []
    for number, (before, after) in enumerate([(PAIRS["tp2 -> dp2"]), (PAIRS["pp2 -> tp2, backwards"])]):
        sources, targets = plain(grid(*before)), grid(*after)
        plan = plan_reallocation(SHAPE, sources, targets, bytes_per_number=4, node_of=lambda rank: 0)
        shard = dict(targets)[world.rank]
        made.append((shard, {n: torch.zeros(size) for n, size in local_shapes(SHAPE, Holding(shard)).items()}))
        source, target = cut(SHAPE, model, sources[world.rank]), [made[-1][1]]
        options = dict(bucket_bytes=700, tag_base=1000 * number, device="cpu", arena=ARENAS[0])
        movers.append(Mover(plan, world.rank, source, target, **options))
        movers[-1].start()
    for mover in movers:
        mover.finish()
    for shard, tensors in made:
        for name, expected in cut(SHAPE, model, Holding(shard)).items():
            assert torch.equal(tensors[name], expected)
