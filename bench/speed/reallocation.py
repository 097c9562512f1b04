"""Reallocation against gathering the whole model on one rank and broadcasting it; 220 MB of float32 weights.

Five pairs of layouts. All ways take turns in the same run, on the same ranks, with groups and buffers made before; what
each leaves behind is compared with the full model, bit by bit. Ranks of one machine move weights through shared memory;
by sockets alone they move as between machines. The baseline gathers the shards of one copy of the model, which lie flat
and need no packing, puts them together and broadcasts the flat model in buckets that are under way together; every
destination slices out what it needs.

Cost: a minute on two cores. Command: mpiexec -n 8 python -m bench reallocation
(without mpiexec it starts eight ranks itself)
"""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.distributed as dist

from bench.ranks import one_world
from bench.rows import Arguments, on, write
from bench.speed.roofline import elapsed_s, in_turns, medians
from bench.tables import ended
from rlhf_spmd.plan.program.instructions import BUCKET_BYTES
from rlhf_spmd.plan.program.reallocate import Reallocation, plan_reallocation
from rlhf_spmd.plan.program.tensors import Holding, weights_of
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.plan.workload import ModelShape
from tests.reallocations import local_shapes, lower_bound_bytes, sent_bytes, sent_messages

NUM_RANKS = 8
SHAPE = ModelShape(6, 768, 2048, 12, 12, 64, 8192)
NUMBER_BYTES = 4
BROADCAST_BYTES = 8 * 2**20  # of the baseline's broadcasts: the fastest of 2, 8, 32 MiB and all at once
ROUNDS = 10  # the first is a warm-up
MOST_BYTES = 1.05  # times the lower bound
ONE_COPY, COPIES = 3.0, 2.0  # required speed-up where the destination keeps one copy of the model, or several

Grid = tuple[tuple[int, ...], int, int, int]  # ranks, dp, pp, tp
PAIRS: dict[str, tuple[Grid, Grid]] = {
    "tp4 -> tp4 on other ranks": (((0, 1, 2, 3), 1, 1, 4), ((4, 5, 6, 7), 1, 1, 4)),
    "tp4 -> dp4 on the same ranks": (((0, 1, 2, 3), 1, 1, 4), ((0, 1, 2, 3), 4, 1, 1)),
    "dp4 -> tp4 on the same ranks": (((0, 1, 2, 3), 4, 1, 1), ((0, 1, 2, 3), 1, 1, 4)),
    "dp2 pp2 tp2 -> dp4 tp2 in place": ((tuple(range(8)), 2, 2, 2), (tuple(range(8)), 4, 1, 2)),
    "tp2 -> tp3 on one rank more": (((0, 1), 1, 1, 2), ((0, 1, 2), 1, 1, 3)),
}


def shards(grid: Grid) -> list[tuple[int, Shard]]:
    """Returns (rank, its shard), in grid order."""
    ranks, dp, pp, tp = grid
    places = product(range(dp), range(pp), range(tp))
    return [(rank, Shard(stage, pp, index, tp)) for rank, (_, stage, index) in zip(ranks, places, strict=True)]


def plan(before: Grid, after: Grid) -> Reallocation:
    sources = {rank: Holding(shard) for rank, shard in shards(before)}
    return plan_reallocation(SHAPE, sources, shards(after), bytes_per_number=NUMBER_BYTES, node_of=lambda rank: 0)


# ---- tensors ---------------------------------------------------------------------------------------------------------


@dataclass
class Weights:
    """The parameters of one shard: views of one flat tensor."""

    shard: Shard
    flat: torch.Tensor
    tensors: dict[str, torch.Tensor]


def weights_in(shard: Shard, flat: torch.Tensor | None = None) -> Weights:
    """Returns the weights of a shard that begin a flat tensor; None: zeros."""
    shapes = {name: torch.Size(shape) for name, shape in local_shapes(SHAPE, Holding(shard)).items()}
    sizes = [shape.numel() for shape in shapes.values()]
    flat = torch.zeros(sum(sizes)) if flat is None else flat[: sum(sizes)]
    return Weights(shard, flat, {n: x.view(shapes[n]) for n, x in zip(shapes, flat.split(sizes), strict=True)})


def slices(full: Weights, shard: Shard) -> dict[str, torch.Tensor]:
    """Returns the slices of the full model that a shard holds, as views."""
    found = {}
    for weight in weights_of(SHAPE):
        box = weight.box(shard)
        if box is not None:
            layers, rows, columns = box
            where = (slice(*rows), slice(*columns))[: weight.num_dims]
            found |= {name: full.tensors[name][where] for _, name in weight.parameters(layers)}
    return found


def full_model() -> Weights:
    """Makes a model in which all numbers differ."""
    numbers = torch.arange(SHAPE.num_params, dtype=torch.int32)
    return weights_in(Shard(), numbers.view(torch.float32))


def fill(weights: Weights, full: Weights) -> Weights:
    for name, piece in slices(full, weights.shard).items():
        weights.tensors[name].copy_(piece)
    return weights


def same_bits(weights: Weights, full: Weights) -> bool:
    pieces = slices(full, weights.shard)
    assert pieces.keys() == weights.tensors.keys()
    return all(
        torch.equal(weights.tensors[name].view(torch.int32), piece.view(torch.int32)) for name, piece in pieces.items()
    )


# ---- the baseline ----------------------------------------------------------------------------------------------------


class GatherBroadcast:
    """One rank gathers a copy of the model and broadcasts it to all ranks that need some of it."""

    def __init__(self, world, name: str, source: Weights | None, target: Weights | None):
        self.rank, self.source, self.target = world.rank, source, target
        before, after = PAIRS[name]
        self.replica = shards(before)[: len(before[0]) // before[1]]
        self.root = self.replica[0][0]
        receivers = {self.root, *after[0]}
        self.gathering = self.rank in dict(self.replica) and len(self.replica) > 1
        self.broadcasting = self.rank in receivers
        self.gather_group = world.group(f"{name}: gather") if self.gathering else None
        self.broadcast_group = world.group(f"{name}: broadcast") if self.broadcasting else None
        self.full: Weights | None = None
        if self.broadcasting:
            alone = self.rank == self.root and len(self.replica) == 1
            self.full = source if alone else weights_in(Shard())
        if self.gathering:
            most = max(len(weights_in(one).flat) for _, one in self.replica)
            self.padded = torch.zeros(most)
            self.parts = [torch.zeros(most) for _ in self.replica] if self.rank == self.root else None

    def run(self) -> None:
        if self.gathering:
            flat = self.source.flat
            if len(flat) < len(self.padded):
                self.padded[: len(flat)] = flat
                flat = self.padded
            dist.gather(flat, self.parts, dst=self.root, group=self.gather_group)
            if self.rank == self.root:
                for (_, shard), part in zip(self.replica, self.parts, strict=True):
                    pieces = weights_in(shard, part).tensors
                    for name, place in slices(self.full, shard).items():
                        place.copy_(pieces[name])
        if self.broadcasting:
            buckets = self.full.flat.split(BROADCAST_BYTES // NUMBER_BYTES)
            works = [dist.broadcast(b, src=self.root, group=self.broadcast_group, async_op=True) for b in buckets]
            for work in works:
                work.wait()
        if self.target is not None:
            for name, piece in slices(self.full, self.target.shard).items():
                self.target.tensors[name].copy_(piece)


def groups() -> dict[str, tuple[int, ...]]:
    found = {}
    for name, (before, after) in PAIRS.items():
        replica = before[0][: len(before[0]) // before[1]]
        found[f"{name}: gather"] = tuple(sorted(replica))
        found[f"{name}: broadcast"] = tuple(sorted({replica[0], *after[0]}))
    return found


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(world, name: str) -> dict:
    """Measures a row: bytes, seconds of both ways (medians of the slowest rank), whether the bits are right."""
    from rlhf_spmd.runtime.weights.shared_memory import Arena
    from rlhf_spmd.runtime.weights.weight_mover import Mover, slot_bytes

    before, after = PAIRS[name]
    one, rank, full = plan(before, after), world.rank, full_model()
    held, wanted = dict(shards(before)).get(rank), dict(shards(after)).get(rank)
    source = None if held is None else fill(weights_in(held), full)
    target = None if wanted is None else weights_in(wanted)
    baseline = GatherBroadcast(world, name, source, target)
    extra, counted = [], []
    shared = Arena.make(world, slot_bytes(one, rank, BUCKET_BYTES))

    def ours(arena: Arena | None = shared) -> None:
        if rank not in one.ranks:
            return
        tensors = source.tensors if source else None
        targets = [target.tensors] if target else []
        where = {"bucket_bytes": BUCKET_BYTES, "tag_base": 0, "device": "cpu", "arena": arena}
        mover = Mover(one, rank, tensors, targets, **where)
        mover.start()
        mover.finish()
        extra.append(mover.peak_extra_bytes)
        counted.append([mover.num_bytes_sent, mover.num_messages_sent])

    def slowest_s(way: Callable[[], None]) -> float:
        world.barrier("the start of a round")
        return max(world.allgather(elapsed_s(way)))

    ways, right = {"ours": ours, "sockets": partial(ours, None), "baseline": baseline.run}, []
    for way in ways.values():
        way()
        right.append(target is None or same_bits(target, full))
        if target is not None:
            target.flat.zero_()
    del full
    gc.collect()
    rounds = in_turns({name: partial(slowest_s, way) for name, way in ways.items()}, ROUNDS)
    seconds = medians(rounds[1:])
    mine = [sent_bytes(one)[rank], sent_messages(one, BUCKET_BYTES)[rank]] if rank in one.ranks else None
    as_planned = all(world.allgather(all(count == mine for count in counted)))
    row = {
        "bench": "reallocation",
        "pair": name,
        "ranks": world.size,
        "weight_bytes": SHAPE.num_params * NUMBER_BYTES,
        "moved_bytes": one.num_bytes,
        "lower_bound_bytes": lower_bound_bytes(one),
        **{f"{name}_s": median_s for name, median_s in seconds.items()},
        "speed_up": seconds["baseline"] / seconds["ours"],
        "required": ONE_COPY if after[1] == 1 else COPIES,
        "bucket_bytes": BUCKET_BYTES,
        "extra_bytes": max(world.allgather(max(extra, default=0))),
        "same_bits": all(all(answers) for answers in world.allgather(right)),
        "as_planned": as_planned,
        **{f"all_{name}_s": [one[name] for one in rounds] for name in ways},
    }
    row["ok"] = (
        row["same_bits"]
        and row["as_planned"]
        and row["moved_bytes"] <= MOST_BYTES * row["lower_bound_bytes"]
        and row["speed_up"] >= row["required"]
        and row["extra_bytes"] <= 2 * BUCKET_BYTES
    )
    return row


def main(arguments: list[str]) -> int:
    Arguments("reallocation", __doc__).parse_args(arguments)
    from rlhf_spmd.runtime.failure.launcher import num_launched

    if num_launched(os.environ) == 1:
        mpirun, *words = on(NUM_RANKS)
        os.execv(mpirun, [mpirun, *words, "bench", "reallocation", *arguments])
    with one_world() as world:
        assert world.size == NUM_RANKS, f"start {NUM_RANKS} ranks, not {world.size}"
        world.start_torch(groups(), threads=1)
        rows = [measure(world, name) for name in PAIRS]
    if world.rank:
        return 0
    write("reallocation", rows)
    return ended("reallocation", rows)
