"""What a planned reallocation must move at least, what each rank sends of it, and the shapes that ranks hold."""

from functools import reduce
from itertools import combinations, product

from rlhf_spmd.plan.program.reallocate import Reallocation
from rlhf_spmd.plan.program.tensors import Holding, numbers_in, overlap, weights_of
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.plan.workload import ModelShape


def sent_bytes(one: Reallocation) -> dict[int, int]:
    """Returns the bytes that each rank sends, what it forwards included."""
    found = dict.fromkeys(one.ranks, 0)
    for (sender, _), num_bytes in one.hop_bytes().items():
        found[sender] += num_bytes
    return found


def sent_messages(one: Reallocation, bucket_bytes: int) -> dict[int, int]:
    """Returns the messages that each rank sends."""
    counts = dict.fromkeys(one.ranks, 0)
    for (sender, _), count in one.hop_messages(bucket_bytes).items():
        counts[sender] += count
    return counts


def lower_bound_bytes(one: Reallocation) -> int:
    """Returns the bytes that receiving ranks need and do not hold, from volumes alone (inclusion and exclusion over a
    rank's targets); no plan can move less."""
    numbers, sources = 0, dict(one.sources)
    shards_of: dict[int, dict[Shard, None]] = {}
    for rank, shard in one.targets:
        shards_of.setdefault(rank, {})[shard] = None
    for weight, (rank, targets) in product(weights_of(one.shape), shards_of.items()):
        own = sources[rank].boxes(weight) if rank in sources else ()
        boxes = [box for shard in targets if (box := weight.box(shard))]
        for count in range(1, len(boxes) + 1):
            for some in combinations(boxes, count):
                common = reduce(lambda a, b: a and overlap(a, b), some)
                if common:
                    parts = [overlap(common, box) for box in own]
                    missing = numbers_in(common) - sum(numbers_in(part) for part in parts if part)
                    numbers += missing if count % 2 else -missing
    return one.bytes_per_number * numbers


def local_shapes(shape: ModelShape, holding: Holding) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter as a rank holds it; [numbers] of a flat part under ZeRO 3, without
    padding."""
    shapes: dict[str, tuple[int, ...]] = {}
    for weight in weights_of(shape):
        box = weight.box(holding.shard)
        if box is None:
            continue
        layers, (r0, r1), (c0, c1) = box
        start, stop = holding.interval(box)
        full = (r1 - r0, c1 - c0)[: weight.num_dims]
        shapes |= {name: full if holding.parts == 1 else (stop - start,) for _, name in weight.parameters(layers)}
    return shapes
