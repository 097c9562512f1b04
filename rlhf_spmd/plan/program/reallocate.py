"""Plans a reallocation: which boxes of a model's weights travel from which rank to which, from one layout to another.

Layouts are arbitrary: tensor-parallel degrees need not divide one another, and ranks may overlap or not. A rank
receives only what it lacks, and once even if two of its copies need it. What several ranks lack travels along a
*chain*, bucket by bucket: each link carries the bytes once, and a chain enters a node once. If several ranks hold a
box, each sends a share of it; those on the receiver's node send it alone if there are any.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rlhf_spmd.plan.program.buckets import DIRECT_BYTES, Bucket, cut_into_buckets, num_packets
from rlhf_spmd.plan.program.tensors import Box, Holding, Piece, Range, Weight, box_of, overlap, trained_weights_of
from rlhf_spmd.plan.shard import Shard, split
from rlhf_spmd.plan.workload import ModelShape

WHOLE_BYTES = 256 * 2**10  # smaller shares are not sent apart: latency outweighs bandwidth
# The longest route has at least NUM_BUCKETS, so that packing, sending, forwarding and unpacking overlap, unless its
# buckets would be smaller than SMALL_BUCKET_BYTES.
NUM_BUCKETS, SMALL_BUCKET_BYTES = 8, 2**20


@dataclass(frozen=True, slots=True)
class Copy:
    """A piece that a rank holds and one of its targets (an index into Reallocation.targets) needs."""

    target: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class Route:
    """A chain: ranks[0] holds the pieces; every other rank receives them from the one before and keeps a copy."""

    ranks: tuple[int, ...]
    pieces: tuple[Piece, ...]
    num_numbers: int  # in all pieces

    @property
    def hops(self) -> Iterator[tuple[int, int]]:
        """(sender, receiver) along the chain."""
        return pairwise(self.ranks)


@dataclass(frozen=True, slots=True)
class Reallocation:
    """All routes between ranks, and local copies; the same on every rank."""

    shape: ModelShape
    sources: tuple[tuple[int, Holding], ...]
    targets: tuple[tuple[int, Shard], ...]
    bytes_per_number: int
    local: tuple[Copy, ...]
    routes: tuple[Route, ...]
    _extra: dict[int, dict[int, int]] = field(default_factory=dict, compare=False, repr=False)  # cache of extra_bytes

    @property
    def weights(self) -> dict[str, Weight]:
        """The table of the weights that move, by name: those that training changes."""
        return {weight.name: weight for weight in trained_weights_of(self.shape)}

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part."""
        return tuple(sorted({rank for rank, _ in (*self.sources, *self.targets)}))

    def targets_of(self, rank: int) -> tuple[int, ...]:
        """Returns the targets of a rank, as indices into `targets`."""
        return tuple(index for index, (owner, _) in enumerate(self.targets) if owner == rank)

    def hop_bytes(self) -> dict[tuple[int, int], int]:
        """Returns the bytes by (sender, receiver)."""
        sizes: Counter[tuple[int, int]] = Counter()
        for route in self.routes:
            sizes.update(dict.fromkeys(route.hops, route.num_numbers * self.bytes_per_number))
        return sizes

    @property
    def num_bytes(self) -> int:
        """All bytes that travel."""
        return sum(self.hop_bytes().values())

    # ---- for a given size of buckets ---------------------------------------------------------------------------------

    def bucket_numbers(self, bucket_bytes: int) -> int:
        """Returns numbers in a bucket of a route: the most at which no rank has more than bucket_bytes in transit.

        A rank in n routes has a bucket of each; routes shorter than their share leave the rest to the others. Buckets
        are smaller if the longest route would otherwise have too few for its ranks to work at the same time.
        """
        sizes: dict[int, list[int]] = {}
        for route in self.routes:
            for rank in route.ranks:
                sizes.setdefault(rank, []).append(route.num_numbers)
        longest = max((route.num_numbers for route in self.routes), default=1)
        most = min(longest, max(-(-longest // NUM_BUCKETS), SMALL_BUCKET_BYTES // self.bytes_per_number))
        for mine in sizes.values():
            left = bucket_bytes // self.bytes_per_number
            for index, size in enumerate(sorted(mine)):
                share = max(1, left // (len(mine) - index))
                if size > share:
                    most = min(most, share)
                    break
                left -= size
        return most

    @staticmethod
    def slot_numbers(route: Route, numbers: int) -> tuple[int, int]:
        """Returns numbers in the two buffers of a route whose buckets hold at most `numbers`; one bucket needs one
        buffer."""
        return (route.num_numbers, 0) if route.num_numbers <= numbers else (numbers, numbers)

    def buckets(self, route: Route, bucket_bytes: int) -> tuple[Bucket, ...]:
        """Returns the data of a route, step by step."""
        direct_numbers = DIRECT_BYTES // self.bytes_per_number
        return cut_into_buckets(route.pieces, numbers=self.bucket_numbers(bucket_bytes), direct_numbers=direct_numbers)

    def hop_messages(self, bucket_bytes: int) -> dict[tuple[int, int], int]:
        """Returns the messages by (sender, receiver)."""
        counts: Counter[tuple[int, int]] = Counter()
        numbers, direct_numbers = self.bucket_numbers(bucket_bytes), DIRECT_BYTES // self.bytes_per_number
        for route in self.routes:
            count = num_packets(route.pieces, numbers=numbers, direct_numbers=direct_numbers)
            counts.update(dict.fromkeys(route.hops, count))
        return counts

    def extra_bytes(self, bucket_bytes: int) -> dict[int, int]:
        """Returns the most memory that each rank needs for buckets: for each of its routes one to receive and one to
        send."""
        if bucket_bytes not in self._extra:  # every rank of a forecast asks
            sizes, numbers = dict.fromkeys(self.ranks, 0), self.bucket_numbers(bucket_bytes)
            for route in self.routes:
                for rank in route.ranks:
                    sizes[rank] += sum(self.slot_numbers(route, numbers)) * self.bytes_per_number
            self._extra[bucket_bytes] = sizes
        return self._extra[bucket_bytes]


def plan_reallocation(
    shape: ModelShape,
    sources: Mapping[int, Holding],
    targets: Sequence[tuple[int, Shard]],
    *,
    bytes_per_number: int,
    node_of: Callable[[int], int],
    whole_bytes: int = WHOLE_BYTES,
) -> Reallocation:
    """Plans how the ranks of `targets` get their shards of what training changes in a model that the ranks of `sources`
    hold together. A rank may have several targets. Some source must hold every needed number.

    node_of: the node of a rank.
    whole_bytes: the smallest share into which a box with several holders is cut; smaller boxes are sent whole, and the
        receivers are divided among the holders.
    """
    local: list[Copy] = []
    lacked: dict[tuple[int, int], list[Piece]] = {}  # masks of the ranks that hold and of the targets that lack -> what
    for weight in trained_weights_of(shape):
        held = [(box, rank) for rank in sorted(sources) for box in sources[rank].boxes(weight)]
        wanted = [(box, index) for index, (_, shard) in enumerate(targets) if (box := weight.box(shard))]
        of_rank: dict[int, list[Box]] = {}
        for own, rank in held:
            of_rank.setdefault(rank, []).append(own)
        for box, index in wanted:
            common = [overlap(box, own) for own in of_rank.get(targets[index][0], ())]
            local += [Copy(index, Piece(weight.name, part)) for part in common if part]
        for key, boxes in _lacking(held, wanted, targets).items():
            assert key[0], f"nobody holds {weight.name} {boxes[0]}"
            lacked.setdefault(key, []).extend(Piece(weight.name, box) for box in boxes)
    chains = _Chains(sources, [rank for rank, _ in targets], node_of)
    carried: dict[tuple[int, ...], list[Piece]] = {}  # chain -> pieces
    for (holders, takers), pieces in lacked.items():
        receivers = {targets[index][0] for index in _members(takers)}
        size = bytes_per_number * sum(piece.num_numbers for piece in pieces)
        for ranks, (index, parts) in chains.among(_members(holders), receivers, size, whole_bytes):
            mine = [part for piece in pieces if (part := _part(piece, index, parts))]
            carried.setdefault(ranks, []).extend(mine)
    routes = (Route(ranks, tuple(of), sum(piece.num_numbers for piece in of)) for ranks, of in carried.items() if of)
    return Reallocation(
        shape, tuple(sorted(sources.items())), tuple(targets), bytes_per_number, tuple(local), tuple(routes)
    )


# ---- who holds what, who lacks what ----------------------------------------------------------------------------------


def _lacking(
    held: list[tuple[Box, int]], wanted: list[tuple[Box, int]], targets: Sequence[tuple[int, Shard]]
) -> dict[tuple[int, int], list[Box]]:
    """Returns boxes of one weight by (mask of the ranks that hold them, mask of the targets whose ranks lack them).

    The weight is cut wherever a box begins or ends, first along the layers, then rows, then columns.
    """
    targets_of: dict[int, int] = {}
    for index, (rank, _) in enumerate(targets):
        targets_of[rank] = targets_of.get(rank, 0) | 1 << index
    masks: dict[Box, list[int]] = {}  # ranks that hold it, their targets, targets that want it
    for box, rank in held:
        mask = masks.setdefault(box, [0, 0, 0])
        mask[0] |= 1 << rank
        mask[1] |= targets_of.get(rank, 0)
    for box, index in wanted:
        masks.setdefault(box, [0, 0, 0])[2] |= 1 << index
    found: dict[tuple[int, int], list[Box]] = {}
    for ranges, inside in _cells(list(masks.items()), 0):
        holders = satisfied = wanting = 0
        for ranks, of_ranks, wants in inside:
            holders, satisfied, wanting = holders | ranks, satisfied | of_ranks, wanting | wants
        if wanting & ~satisfied:
            found.setdefault((holders, wanting & ~satisfied), []).append(box_of(ranges))
    return {key: _joined(boxes) for key, boxes in found.items()}


def _cells(boxes: list[tuple[Box, list[int]]], dim: int) -> Iterator[tuple[tuple[Range, ...], list[list[int]]]]:
    """Yields the cells between the edges of boxes, each with the masks of the boxes around it; only cells that some
    target wants."""
    if dim == 3:
        yield (), [mask for _, mask in boxes]
        return
    for first, last in pairwise(sorted({edge for box, _ in boxes for edge in box[dim]})):
        inside = [entry for entry in boxes if entry[0][dim][0] <= first and last <= entry[0][dim][1]]
        if any(mask[2] for _, mask in inside):
            for rest, masks in _cells(inside, dim + 1):
                yield ((first, last), *rest), masks


def _joined(boxes: list[Box]) -> list[Box]:
    """Joins boxes that touch along one dim and are equal in the others."""
    for dim in (2, 1, 0):
        runs: dict[tuple[Range, ...], list[Range]] = {}
        for box in boxes:
            mine = runs.setdefault(box[:dim] + box[dim + 1 :], [])
            if mine and mine[-1][1] == box[dim][0]:
                mine[-1] = mine[-1][0], box[dim][1]
            else:
                mine.append(box[dim])
        boxes = [box_of((*rest[:dim], run, *rest[dim:])) for rest, mine in runs.items() for run in mine]
    return boxes


def _members(mask: int) -> list[int]:
    """Returns the numbers of the bits that are set."""
    return [number for number, bit in enumerate(reversed(f"{mask:b}")) if bit == "1"]


# ---- who sends -------------------------------------------------------------------------------------------------------


class _Chains:
    """Finds chains from holders through receivers. All ranks form a ring, ordered by node."""

    def __init__(self, sources: Iterable[int], receivers: Iterable[int], node_of: Callable[[int], int]):
        sources = sorted(sources)
        self.nodes = {rank: node_of(rank) for rank in {*sources, *receivers}}
        ring = sorted(self.nodes, key=lambda rank: (self.nodes[rank], rank))
        self.place = {rank: place for place, rank in enumerate(ring)}
        self.sources = sorted(self.place[rank] for rank in sources)

    def among(
        self, holders: Sequence[int], receivers: Iterable[int], num_bytes: int, whole_bytes: int
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, int]]]:
        """Yields (ranks, (index, parts)): each chain, and which part of the holders' boxes travels along it."""
        eligible: dict[tuple[int, ...], list[int]] = {}
        on_node: dict[int, list[int]] = {}
        for holder in holders:
            on_node.setdefault(self.nodes[holder], []).append(holder)
        for rank in sorted(receivers, key=self.place.__getitem__):
            near = on_node.get(self.nodes[rank], holders)
            eligible.setdefault(tuple(near), []).append(rank)
        for near_ones, takers in eligible.items():
            senders = sorted(near_ones, key=self.place.__getitem__)
            if num_bytes >= len(senders) * whole_bytes:
                for index, sender in enumerate(senders):
                    yield (sender, *self._order(sender, takers)), (index, len(senders))
            else:  # takers are dealt out in turn, so that equal slices of different stages share chains
                for index, sender in enumerate(senders):
                    if mine := takers[index :: len(senders)]:
                        yield (sender, *self._order(sender, mine)), (0, 1)

    def _order(self, sender: int, takers: list[int]) -> list[int]:
        """Returns the takers in the order of a chain: node by node around the ring, beginning at the sender's node.

        Inside a node the chain begins after the sender. Senders between the same two takers begin at successive takers,
        so that the chains of a layout load every link equally, and an all-gather becomes a ring.
        """
        by_node: dict[int, list[int]] = {}
        for rank in takers:
            by_node.setdefault(self.nodes[rank], []).append(rank)
        order = []
        for node in sorted(by_node, key=lambda node: (node < self.nodes[sender], node)):
            ranks = by_node[node]
            places = [self.place[rank] for rank in ranks]
            next_one = bisect_left(places, self.place[sender])
            before = bisect_right(self.sources, places[next_one - 1])
            in_gap = (bisect_left(self.sources, self.place[sender]) - before) % len(self.sources)
            start = (next_one + in_gap) % len(ranks)
            order += ranks[start:] + ranks[:start]
        return order


def _part(piece: Piece, index: int, parts: int) -> Piece | None:
    """Returns one of `parts` nearly equal parts of a piece, cut by rows if there are enough, else by layers or
    columns."""
    if parts == 1:
        return piece
    sizes = [last - first for first, last in piece.box]
    dim = next((dim for dim in (1, 0, 2) if sizes[dim] >= parts), max((1, 0, 2), key=sizes.__getitem__))
    mine, first = split(sizes[dim], parts, index), piece.box[dim][0]
    if not mine:
        return None
    run = first + mine.start, first + mine.stop
    return Piece(piece.weight, box_of((*piece.box[:dim], run, *piece.box[dim + 1 :])))
