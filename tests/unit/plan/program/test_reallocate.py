"""Reallocation plans, carried out with numpy in one process and compared with slices of the whole model.

The simulated carrying out is strict: a sender must hold what it sends, nobody receives what it holds, and every number
of every target is written exactly once.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.program.buckets import cut_into_buckets
from rlhf_spmd.plan.program.reallocate import Reallocation, plan_reallocation
from rlhf_spmd.plan.program.tensors import Holding, Piece, Weight, overlap, weights_of
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.plan.workload import ModelShape
from tests.reallocations import lower_bound_bytes, sent_bytes, sent_messages

SMALL = ModelShape(4, 24, 48, 12, 12, 2, 96)
NUMBER_BYTES = 4


def grid(ranks, dp=1, pp=1, tp=1) -> list[tuple[int, Shard]]:
    """Returns (rank, shard) of a layout, in grid order."""
    assert len(ranks) == dp * pp * tp
    places = [(stage, index) for _ in range(dp) for stage in range(pp) for index in range(tp)]
    return [(rank, Shard(stage, pp, index, tp)) for rank, (stage, index) in zip(ranks, places, strict=True)]


def holding(shards, zero3=False) -> dict[int, Holding]:
    """Returns what ranks hold; under ZeRO 3 ranks with the same shard hold parts of it."""
    found = {}
    for rank, shard in shards:
        mates = [other for other, same in shards if same == shard]
        found[rank] = Holding(shard, mates.index(rank), len(mates)) if zero3 else Holding(shard)
    return found


def plan(sources, targets, shape=SMALL, node_of=lambda rank: 0, **options) -> Reallocation:
    sources = sources if isinstance(sources, dict) else holding(sources)
    return plan_reallocation(shape, sources, targets, bytes_per_number=NUMBER_BYTES, node_of=node_of, **options)


# ---- carrying out ----------------------------------------------------------------------------------------------------

Values = dict[tuple, np.ndarray]  # (rank or target, weight) -> [layers, rows, columns] of the whole model, -1: not here


def where(box) -> tuple[slice, ...]:
    return tuple(slice(*run) for run in box)


def whole_model(shape: ModelShape) -> dict[str, np.ndarray]:
    """Makes a model in which every number is unlike any other."""
    values, start = {}, 0
    for weight in weights_of(shape):
        size = weight.layers * weight.rows * weight.columns
        values[weight.name] = np.arange(start, start + size).reshape(weight.layers, weight.rows, weight.columns)
        start += size
    return values


def nothing(weight: Weight) -> np.ndarray:
    return np.full((weight.layers, weight.rows, weight.columns), -1)


def hold(one: Reallocation, model: dict[str, np.ndarray]) -> Values:
    """Returns what the sources hold of a model."""
    values = {}
    for rank, mine in one.sources:
        for weight in one.weights.values():
            values[rank, weight.name] = nothing(weight)
            for box in mine.boxes(weight):
                values[rank, weight.name][where(box)] = model[weight.name][where(box)]
    return values


def carry_out(one: Reallocation, held: Values) -> Values:
    """Returns the targets, by index and weight."""
    weights = one.weights
    made = {(index, name): nothing(weight) for index in range(len(one.targets)) for name, weight in weights.items()}

    def put(index: int, piece: Piece, numbers: np.ndarray) -> None:
        place = made[index, piece.weight][where(piece.box)]
        assert (place == -1).all(), "written twice"
        place[...] = numbers

    for copy in one.local:
        numbers = held[one.targets[copy.target][0], copy.piece.weight][where(copy.piece.box)]
        assert (numbers >= 0).all(), "copies what it does not hold"
        put(copy.target, copy.piece, numbers)
    for route in one.routes:
        assert len(set(route.ranks)) == len(route.ranks) > 1
        assert route.num_numbers == sum(piece.num_numbers for piece in route.pieces)
        for piece in route.pieces:
            numbers = held[route.ranks[0], piece.weight][where(piece.box)]
            assert (numbers >= 0).all(), "sends what it does not hold"
            for rank in route.ranks[1:]:
                if (rank, piece.weight) in held:
                    assert (held[rank, piece.weight][where(piece.box)] == -1).all(), "receives what it holds"
                takers = [
                    index
                    for index in one.targets_of(rank)
                    if (box := weights[piece.weight].box(one.targets[index][1])) and overlap(box, piece.box)
                ]
                assert takers, "receives what it does not need"
                for index in takers:
                    box = weights[piece.weight].box(one.targets[index][1])
                    assert overlap(box, piece.box) == piece.box, "a piece is in a target or outside it"
                    put(index, piece, numbers)
    return made


def check(one: Reallocation) -> None:
    """Checks that the targets are slices of the model, and that no byte travels in vain."""
    model = whole_model(one.shape)
    made = carry_out(one, hold(one, model))
    for index, (_, shard) in enumerate(one.targets):
        for weight in one.weights.values():
            expected, box = nothing(weight), weight.box(shard)
            if box is not None:
                expected[where(box)] = model[weight.name][where(box)]
            assert (made[index, weight.name] == expected).all(), (weight.name, shard)
    assert one.num_bytes == lower_bound_bytes(one) == sum(sent_bytes(one).values())


# ---- any layouts -----------------------------------------------------------------------------------------------------


@st.composite
def shapes(draw) -> ModelShape:
    kv_heads = draw(st.integers(1, 5))
    flags = {
        name: draw(st.booleans()) for name in ("tied", "scalar_head", "qkv_bias", "output_bias", "mlp_bias", "qk_norm")
    }
    sizes = [draw(st.integers(low, high)) for low, high in [(1, 5), (1, 6), (1, 11)]]
    return ModelShape(*sizes, kv_heads * draw(st.integers(1, 2)), kv_heads, 2, draw(st.integers(1, 13)), **flags)


@st.composite
def layouts(draw, shape: ModelShape) -> list[tuple[int, Shard]]:
    """Returns any grid on any ranks of ten, in any order."""
    degrees = [
        (dp, pp, tp)
        for dp in range(1, 9)
        for pp in range(1, shape.num_layers + 1)
        for tp in range(1, shape.num_kv_heads + 1)
        if dp * pp * tp <= 8
    ]
    dp, pp, tp = draw(st.sampled_from(degrees))
    return grid(draw(st.permutations(range(10)))[: dp * pp * tp], dp, pp, tp)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_layout_to_any_other(data):
    shape = data.draw(shapes())
    before, after = data.draw(layouts(shape)), data.draw(layouts(shape))
    if data.draw(st.booleans()):  # a second copy of other shards, partly on the same ranks
        after = after + data.draw(layouts(shape))
    sources = holding(before, zero3=data.draw(st.booleans()))
    per_node, whole_bytes = data.draw(st.integers(1, 10)), data.draw(st.sampled_from([0, 64, 10**9]))
    check(plan(sources, after, shape, node_of=lambda rank: rank // per_node, whole_bytes=whole_bytes))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_buckets_carry_the_pieces_in_order(data):
    shape = data.draw(shapes())
    one = plan(data.draw(layouts(shape)), data.draw(layouts(shape)), shape, whole_bytes=0)
    numbers, direct = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 60))
    model = whole_model(shape)
    for route in one.routes:
        buckets = cut_into_buckets(route.pieces, numbers=numbers, direct_numbers=direct)
        found = []
        for bucket in buckets:
            assert 0 < sum(block.num_numbers for message in bucket for block in message) <= numbers
            for message in bucket:
                assert len(message) == 1 or all(block.num_numbers < direct for block in message)
                for block in message:
                    found += (
                        model[block.weight][block.layer][slice(*block.rows), slice(*block.columns)].ravel().tolist()
                    )
        expected = [number for piece in route.pieces for number in model[piece.weight][where(piece.box)].ravel()]
        assert found == expected


def test_buckets_of_all_routes_of_a_rank_fit_together():
    one = plan(grid(range(8), 1, 2, 4), grid(range(8), 8), whole_bytes=0)
    for bucket_bytes in (64, 1000, 10_000, 10**9):
        extra, numbers = one.extra_bytes(bucket_bytes), one.bucket_numbers(bucket_bytes)
        assert max(extra.values()) <= max(2 * bucket_bytes, 2 * NUMBER_BYTES * len(one.routes))
        assert numbers == max(r.num_numbers for r in one.routes) or numbers < bucket_bytes // NUMBER_BYTES
    assert sent_messages(one, 64)[0] > sent_messages(one, 10_000)[0] > sent_messages(one, 10**9)[0]
    assert all(len(one.buckets(route, 10**9)) == 1 for route in one.routes)


# ---- named pairs, in closed form -------------------------------------------------------------------------------------


def size_of(shape: ModelShape) -> int:
    return shape.num_params * NUMBER_BYTES


def test_a_sender_on_the_same_node_wins():
    """Replicas on both nodes: nothing crosses; where a node has none, each byte enters it once."""
    node_of = Cluster.parse("3x2").node_of
    one = plan(grid((0, 2), 2), grid((1, 3), 2), node_of=node_of)
    assert set(one.hop_bytes()) == {(0, 1), (2, 3)}
    one = plan(grid((0, 2), 2), grid((1, 3, 4, 5), 4), node_of=node_of, whole_bytes=0)
    crossing = sum(size for (a, b), size in one.hop_bytes().items() if node_of(a) != node_of(b))
    assert crossing == size_of(SMALL)
    assert one.hop_bytes()[0, 1] == one.hop_bytes()[2, 3] == size_of(SMALL)
    assert one.hop_bytes()[4, 5] == one.hop_bytes()[5, 4] == size_of(SMALL) // 2
