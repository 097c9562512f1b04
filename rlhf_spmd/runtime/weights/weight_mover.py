"""Reallocation, executed: this rank's part of a plan (plan/program/reallocate.py), in buckets over the world group.

All routes advance in lock step: at step t, the link h of a chain carries bucket t - h. While the messages of a step are
under way, the buckets that came in the step before are unpacked, those that leave in the next one are packed, and some
of what is held here is copied. A large block that is one run of memory leaves from the parameter itself or arrives
there; all else takes two buffers per route, two buckets in all. What is forwarded leaves from where it came.

Where the ranks of a route share memory (shared_memory.py), it is no chain: the first rank puts a bucket into one of its
two slots, says so to the others, and all of them read it there; a slot is filled again when all have said that they
have.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.plan.program.buckets import DIRECT_BYTES, Block, Bucket, Message, numbers_of
from rlhf_spmd.plan.program.reallocate import Reallocation, Route
from rlhf_spmd.plan.program.tensors import Holding, Weight, overlap
from rlhf_spmd.runtime.weights.shared_memory import Arena


class Mover:
    """One reallocation on one rank; made anew each time. Every rank of the plan starts and finishes it.

    source: this rank's tensors by parameter name (`layers.3.mlp.up_proj.weight`), [rows, columns] or [rows] of its
    shard, or flat under ZeRO 3 (padding at the end does no harm); None for a rank that holds nothing. targets: the
    tensors to fill, in the order of `plan.targets_of(rank)`. All have one dtype of plan.bytes_per_number bytes, on any
    devices; buckets lie on `device`. bucket_bytes: as in the plan's methods, the same on every rank. Tags from tag_base
    to tag_base + the number of routes are this reallocation's while it is under way.

    num_bytes_sent, num_messages_sent: so far; peak_extra_bytes: the most memory that its buckets took at once.
    """

    def __init__(
        self,
        plan: Reallocation,
        rank: int,
        source: Mapping[str, Tensor] | None,
        targets: Sequence[Mapping[str, Tensor]],
        *,
        bucket_bytes: int,
        tag_base: int,
        device: torch.device | str,
        arena: Arena | None = None,
    ):
        """arena: with room for `slot_bytes` of this plan in the part of every rank; one reallocation after another
        may use it."""
        self.plan, self.rank, self.device = plan, rank, torch.device(device)
        weights, self.direct_numbers = plan.weights, DIRECT_BYTES // plan.bytes_per_number
        held = dict(plan.sources).get(rank)
        self.source = None if held is None else _Local(weights, held, source or {})
        mine = plan.targets_of(rank)
        self.targets = {
            index: _Local(weights, Holding(plan.targets[index][1]), tensors)
            for index, tensors in zip(mine, targets, strict=True)
        }
        places = [place for place in (self.source, *self.targets.values()) if place is not None]
        dtypes = {tensor.dtype for place in places for tensor in place.tensors.values()}
        assert len(dtypes) <= 1, f"weights of several dtypes: {dtypes}"
        self.dtype = dtypes.pop() if dtypes else None
        assert self.dtype is None or self.dtype.itemsize == plan.bytes_per_number, (self.dtype, plan.bytes_per_number)
        self.parts = [
            _Part(route, tag_base + number, route.ranks.index(rank), plan.buckets(route, bucket_bytes))
            for number, route in enumerate(plan.routes)
            if rank in route.ranks
        ]
        self.slot_bytes = 0
        slots = _slots(plan, arena, bucket_bytes) if arena is not None else {}
        for part in self.parts:
            if (found := slots.get(part.route)) is not None:
                part.shared, part.buffers = True, {i: slot.view(self.dtype) for i, slot in enumerate(found)}
                self.slot_bytes += sum(slot.nbytes for slot in found) if part.place == 0 else 0
            part.in_place = [
                [self._in_place(part, number, message) for message in bucket]
                for number, bucket in enumerate(part.buckets)
            ]
        self.num_steps = max((part.num_steps for part in self.parts), default=0)
        self.under_way: list[dist.Work] = []
        self.num_bytes_sent = self.num_messages_sent = 0
        self.peak_extra_bytes = self.slot_bytes

    @torch.no_grad()
    def start(self) -> None:
        """Posts the first messages and returns at once.

        The source must not change before `finish` has returned; the targets keep their contents until it begins.
        """
        self._pack(0, shared=False)  # what is shared may still be in use by the reallocation before
        self.under_way = self._post(0, shared=False)

    @torch.no_grad()
    def finish(self) -> None:
        """Copies what is held here, moves all the rest, and returns when every target of this rank is complete.

        Peers must be in their `finish` too, since a chain advances only while all its ranks do.
        """
        local = [
            (Block(copy.piece.weight, layer, *copy.piece.box[1:]), self.targets[copy.target])
            for copy in self.plan.local
            if copy.target in self.targets
            for layer in range(*copy.piece.box[0])
        ]
        self._pack(0, shared=True)
        self.under_way += self._post(0, shared=True)
        for step in range(self.num_steps):
            self._unpack(step - 1)
            self.under_way += self._give_back(step - 1)
            self._pack(step + 1, shared=False)
            self._copy_local(local[step :: self.num_steps])  # a share in each step, so that no message waits for all
            for work in self.under_way:
                work.wait()
            self._pack(step + 1, shared=True)  # now the slot is free
            self.under_way = self._post(step + 1, shared=False) + self._post(step + 1, shared=True)
        if self.num_steps == 0:
            self._copy_local(local)
        self._unpack(self.num_steps - 1)
        for work in self._give_back(self.num_steps - 1):
            work.wait()
        for part in self.parts:
            part.buffers.clear()
            part.tensors.clear()

    def _post(self, step: int, *, shared: bool) -> list[dist.Work]:
        """Starts this rank's messages of a step: of chains, or the words about slots."""
        operations = []
        for part in self.parts:
            if part.shared != shared:
                continue
            if shared:
                operations += self._words(part, step)
                continue
            if (bucket := part.arriving(step)) is not None:
                self._make_room(part, bucket)
                peer = part.route.ranks[part.place - 1]
                operations += [dist.P2POp(dist.irecv, b, peer, tag=part.tag) for b in part.tensors[bucket]]
            if (bucket := part.leaving(step)) is not None:
                peer = part.route.ranks[part.place + 1]
                operations += [dist.P2POp(dist.isend, b, peer, tag=part.tag) for b in part.tensors[bucket]]
                self.num_bytes_sent += sum(tensor.nbytes for tensor in part.tensors[bucket])
                self.num_messages_sent += len(part.tensors[bucket])
        return dist.batch_isend_irecv(operations) if operations else []

    def _words(self, part: "_Part", step: int) -> list[dist.P2POp]:
        """The first rank: a slot is full, and who is done with the one before? The others: which slot is full?"""
        first, *others = part.route.ranks
        if step < len(part.buckets) and part.place < len(others):  # counted as the plan does, whatever carries it
            self.num_bytes_sent += sum(map(numbers_of, part.buckets[step])) * self.plan.bytes_per_number
            self.num_messages_sent += len(part.buckets[step])
        if part.place > 0:
            if part.arriving(step) is None:
                return []
            self._make_room(part, step)
            return [dist.P2POp(dist.irecv, _word(), first, tag=part.tag)]
        said = [dist.isend] if part.leaving(step) is not None else []
        said += [dist.irecv] if 0 < step <= len(part.buckets) else []
        return [dist.P2POp(operation, _word(), rank, tag=part.tag) for operation in said for rank in others]

    def _give_back(self, step: int) -> list[dist.Work]:
        """Says to the first ranks that the slots of a step have been read."""
        parts = [part for part in self.parts if part.shared and part.arriving(step) is not None]
        operations = [dist.P2POp(dist.isend, _word(), part.route.ranks[0], tag=part.tag) for part in parts]
        return dist.batch_isend_irecv(operations) if operations else []

    def _pack(self, step: int, *, shared: bool) -> None:
        """Makes the buckets ready that leave from here in a step for the first time."""
        for part in self.parts:
            bucket = part.leaving(step) if part.place == 0 and part.shared == shared else None
            if bucket is None:
                continue
            self._make_room(part, bucket)
            places = part.in_place[bucket]
            for message, tensor, there in zip(part.buckets[bucket], part.tensors[bucket], places, strict=True):
                if there is None:
                    for block, numbers in _blocks_in(tensor, message):
                        numbers.copy_(self.source.view(block))

    def _unpack(self, step: int) -> None:
        """Puts what came in a step where it belongs, and where it is not yet."""
        for part in self.parts:
            bucket = part.arriving(step)
            if bucket is None:
                continue
            for message, tensor in zip(part.buckets[bucket], part.tensors[bucket], strict=True):
                for block, numbers in _blocks_in(tensor, message):
                    for target in self._targets_with(block):
                        view = target.view(block)
                        if view.data_ptr() != numbers.data_ptr():  # else it came where it belongs
                            view.copy_(numbers)

    def _targets_with(self, block: Block) -> list["_Local"]:
        return [target for target in self.targets.values() if target.has(block)]

    def _make_room(self, part: "_Part", bucket: int) -> None:
        """Finds a place for every message of a bucket, which replaces the one before the last."""
        part.tensors.pop(bucket - 2, None)
        if part.shared:
            part.buffers[bucket] = part.buffers[bucket % 2]
        elif bucket not in part.buffers and bucket - 2 not in part.buffers:
            most = max(part.packed_numbers(number) for number in range(bucket, len(part.buckets), 2))
            part.buffers[bucket] = torch.empty(most, dtype=self.dtype, device=self.device)
            under_way = [buffer for each in self.parts if not each.shared for buffer in each.buffers.values()]
            extra_bytes = self.slot_bytes + sum(buffer.nbytes for buffer in under_way)
            self.peak_extra_bytes = max(self.peak_extra_bytes, extra_bytes)
        elif bucket - 2 in part.buffers:
            part.buffers[bucket] = part.buffers.pop(bucket - 2)
        start, tensors = 0, []
        for message, there in zip(part.buckets[bucket], part.in_place[bucket], strict=True):
            size = 0 if there is not None else numbers_of(message)
            tensors.append(part.buffers[bucket][start : start + size] if there is None else there)
            start += size
        part.tensors[bucket] = tensors

    def _in_place(self, part: "_Part", bucket: int, message: Message) -> Tensor | None:
        """A message as it lies in the memory of a parameter, to be sent from there or received there; None if it does
        not: several blocks are packed, and so is one that is not one run of memory."""
        first = part.place == 1 and bucket == 0  # received from `start` on, when targets may still be in use
        if part.shared or first or len(message) > 1 or message[0].num_numbers < self.direct_numbers:
            return None
        for place in [self.source] if part.place == 0 else self._targets_with(message[0]):
            view = place.view(message[0])
            if view.is_contiguous() and view.device == self.device:
                return view.view(-1)
        return None

    def _copy_local(self, blocks: Iterable[tuple[Block, "_Local"]]) -> None:
        for block, target in blocks:
            target.view(block).copy_(self.source.view(block))


def slot_bytes(plan: Reallocation, rank: int, bucket_bytes: int) -> int:
    """What the part of a rank in an arena must hold: the slots of each route that begins there."""
    numbers = plan.bucket_numbers(bucket_bytes)
    slots = [plan.slot_numbers(route, numbers) for route in plan.routes if route.ranks[0] == rank]
    return sum(map(sum, slots)) * plan.bytes_per_number


def _slots(plan: Reallocation, arena: Arena, bucket_bytes: int) -> dict[Route, list[Tensor]]:
    """The slots of every route whose ranks share memory, one after the other in the part of its first rank."""
    numbers, used, found = plan.bucket_numbers(bucket_bytes), dict.fromkeys(arena.parts, 0), {}
    for route in plan.routes:
        if not arena.holds(route.ranks):
            continue
        first, sizes = route.ranks[0], [n * plan.bytes_per_number for n in plan.slot_numbers(route, numbers)]
        if used[first] + sum(sizes) <= len(arena.parts[first]):
            found[route] = list(arena.parts[first][used[first] : used[first] + sum(sizes)].split(sizes))
            used[first] += sum(sizes)
    return found


def _word() -> Tensor:
    """What is said about a slot; that it comes is all there is to it."""
    return torch.zeros(1, dtype=torch.uint8)


def _blocks_in(numbers: Tensor, message: Message) -> Iterator[tuple[Block, Tensor]]:
    """The blocks of a message and where each lies in it, as a matrix."""
    start = 0
    for block in message:
        (r0, r1), (c0, c1) = block.rows, block.columns
        yield block, numbers[start : start + block.num_numbers].view(r1 - r0, c1 - c0)
        start += block.num_numbers


@dataclass(slots=True)
class _Part:
    """What this rank does in a route: it stands at `place` of the chain."""

    route: Route
    tag: int
    place: int
    buckets: tuple[Bucket, ...]
    in_place: list[list[Tensor | None]] = field(default_factory=list)  # of every bucket the messages; None: packed
    buffers: dict[int, Tensor] = field(default_factory=dict)  # bucket -> what its packed messages lie in, of two
    tensors: dict[int, list[Tensor]] = field(default_factory=dict)  # bucket -> its messages, of the same two
    shared: bool = False  # all its ranks see the buffers of the first

    @property
    def num_steps(self) -> int:
        """Steps until this rank has nothing more to do."""
        if self.shared:  # the first also hears that the last bucket has been read
            return len(self.buckets) + (self.place == 0)
        last = self.place == len(self.route.ranks) - 1
        return len(self.buckets) + self.place - last

    def packed_numbers(self, bucket: int) -> int:
        """Numbers of a bucket that need room in a buffer."""
        pairs = zip(self.buckets[bucket], self.in_place[bucket], strict=True)
        return sum(numbers_of(message) for message, there in pairs if there is None)

    def arriving(self, step: int) -> int | None:
        """The bucket that comes in a step."""
        bucket = step if self.shared else step - self.place + 1
        return bucket if self.place > 0 and 0 <= bucket < len(self.buckets) else None

    def leaving(self, step: int) -> int | None:
        """The bucket that leaves in a step."""
        bucket, last = step - self.place, self.place == len(self.route.ranks) - 1
        return bucket if not last and 0 <= bucket < len(self.buckets) else None


class _Local:
    """Tensors of one holding, addressed by blocks of the whole model."""

    def __init__(self, weights: Mapping[str, Weight], holding: Holding, tensors: Mapping[str, Tensor]):
        self.weights, self.holding, self.tensors = weights, holding, tensors
        self.boxes = {name: box for name, weight in weights.items() if (box := weight.box(holding.shard))}

    def has(self, block: Block) -> bool:
        """Whether the shard contains a block."""
        mine, box = self.boxes.get(block.weight), ((block.layer, block.layer + 1), block.rows, block.columns)
        return mine is not None and overlap(mine, box) == box

    def view(self, block: Block) -> Tensor:
        """The block as a matrix that shares memory with the parameter."""
        (r0, r1), (c0, c1) = block.rows, block.columns
        weight, box = self.weights[block.weight], self.boxes[block.weight]
        tensor = self.tensors[weight.name.format(block.layer)]
        _, (top, bottom), (left, right) = box
        if self.holding.parts == 1:
            assert tensor.shape == (bottom - top, right - left)[: weight.num_dims], (weight.name, tensor.shape, box)
            return tensor.view(bottom - top, right - left)[r0 - top : r1 - top, c0 - left : c1 - left]
        width, (start, stop) = right - left, self.holding.interval(box)
        assert tensor.dim() == 1 and len(tensor) >= stop - start, (weight.name, tensor.shape, stop - start)
        offset = (r0 - top) * width + c0 - left - start
        assert offset >= 0 and offset + (r1 - r0 - 1) * width + c1 - c0 <= stop - start, block
        return tensor.as_strided((r1 - r0, c1 - c0), (width, 1), tensor.storage_offset() + offset)
