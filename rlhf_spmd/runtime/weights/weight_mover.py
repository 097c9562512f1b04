"""Executes this rank's part of a reallocation plan (plan/program/reallocate.py), in buckets over the world group.

All routes advance in lock step: at step t, link h of a chain carries bucket t - h. While the messages of a step are
being sent, buckets received in the previous step are unpacked, buckets of the next step are packed, and some local
blocks are copied. A large block that is contiguous in memory is sent from, or received into, the parameter itself; all
others use two buffers per route (two buckets). A forwarded bucket is sent from the memory that received it.

If the ranks of a route share memory (shared_memory.py), there is no chain: the first rank puts a bucket into one of its
two slots and notifies the other ranks, which read it. A slot is reused when all of them have confirmed that.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.plan.program.buckets import DIRECT_BYTES, Block, Bucket, Packet, numbers_of
from rlhf_spmd.plan.program.reallocate import Reallocation, Route
from rlhf_spmd.plan.program.tensors import Holding, Weight, overlap
from rlhf_spmd.runtime.weights.shared_memory import Arena


class Mover:
    """One reallocation on one rank, used once. Every rank of the plan starts and finishes it.

    source: this rank's tensors by parameter name (`layers.3.mlp.up_proj.weight`), [rows, columns] or [rows] of its
    shard, or flat under ZeRO 3 (may end in padding); None for a rank without weights. targets: the tensors to fill, in
    the order of `plan.targets_of(rank)`. All have one dtype of plan.bytes_per_number bytes, on any devices; buckets are
    on `device`. bucket_bytes: as in the plan's methods, the same on every rank. While it runs, the reallocation uses
    the tags from tag_base to tag_base + the number of routes.

    num_bytes_sent, num_messages_sent: so far; peak_extra_bytes: peak memory of its buckets.
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
        """arena: with `slot_bytes` of this plan in the part of every rank; consecutive reallocations may share it."""
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
            if (of_route := slots.get(part.route)) is not None:
                part.shared, part.buffers = True, {i: slot.view(self.dtype) for i, slot in enumerate(of_route)}
                self.slot_bytes += sum(slot.nbytes for slot in of_route) if part.place == 0 else 0
            part.in_place = [
                [self._in_place(part, number, message) for message in bucket]
                for number, bucket in enumerate(part.buckets)
            ]
        self.num_steps = max((part.num_steps for part in self.parts), default=0)
        self.works: list[dist.Work] = []
        self.num_bytes_sent = self.num_messages_sent = 0
        self.peak_extra_bytes = self.slot_bytes

    @property
    def _held(self) -> "_Local":
        assert self.source is not None, "a rank that sends holds weights"
        return self.source

    @torch.no_grad()
    def start(self) -> None:
        """Posts the first messages and returns immediately.

        The source must not change before `finish` returns; the targets do not change before `finish` begins.
        """
        self._pack(0, shared=False)  # the previous reallocation may still use the shared slots
        self.works = self._post(0, shared=False)

    @torch.no_grad()
    def finish(self) -> None:
        """Copies local blocks, transfers remote ones, and returns when every target of this rank is complete.

        All peers must call `finish`, because a chain advances only if all its ranks do.
        """
        local = [
            (Block(copy.piece.weight, layer, *copy.piece.box[1:]), self.targets[copy.target])
            for copy in self.plan.local
            if copy.target in self.targets
            for layer in range(*copy.piece.box[0])
        ]
        self._pack(0, shared=True)
        self.works += self._post(0, shared=True)
        for step in range(self.num_steps):
            self._unpack(step - 1)
            self.works += self._confirm_read(step - 1)
            self._pack(step + 1, shared=False)
            self._copy_local(local[step :: self.num_steps])  # a share per step, so no message waits for all copies
            for work in self.works:
                work.wait()
            self._pack(step + 1, shared=True)  # the slot is free now
            self.works = self._post(step + 1, shared=False) + self._post(step + 1, shared=True)
        if self.num_steps == 0:
            self._copy_local(local)
        self._unpack(self.num_steps - 1)
        for work in self._confirm_read(self.num_steps - 1):
            work.wait()
        for part in self.parts:
            part.buffers.clear()
            part.tensors.clear()

    def _post(self, step: int, *, shared: bool) -> list[dist.Work]:
        """Starts this rank's messages of a step: the buckets of chains, or notifications about shared slots."""
        operations = []
        for part in self.parts:
            if part.shared != shared:
                continue
            if shared:
                operations += self._notifications(part, step)
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

    def _notifications(self, part: "_Part", step: int) -> list[dist.P2POp]:
        """Returns the notifications of a rank. The first rank sends that a slot is full, and receives that the previous
        one has been read. Others receive the former."""
        first, *others = part.route.ranks
        if step < len(part.buckets) and part.place < len(others):  # counted as in the plan, although not sent
            self.num_bytes_sent += sum(map(numbers_of, part.buckets[step])) * self.plan.bytes_per_number
            self.num_messages_sent += len(part.buckets[step])
        if part.place > 0:
            if part.arriving(step) is None:
                return []
            self._make_room(part, step)
            return [dist.P2POp(dist.irecv, _token(), first, tag=part.tag)]
        directions = [dist.isend] if part.leaving(step) is not None else []
        directions += [dist.irecv] if 0 < step <= len(part.buckets) else []
        return [dist.P2POp(direction, _token(), rank, tag=part.tag) for direction in directions for rank in others]

    def _confirm_read(self, step: int) -> list[dist.Work]:
        """Confirms to the first ranks that the slots of a step have been read."""
        parts = [part for part in self.parts if part.shared and part.arriving(step) is not None]
        operations = [dist.P2POp(dist.isend, _token(), part.route.ranks[0], tag=part.tag) for part in parts]
        return dist.batch_isend_irecv(operations) if operations else []

    def _pack(self, step: int, *, shared: bool) -> None:
        """Packs the buckets that this rank, as the first of a chain, sends in a step."""
        for part in self.parts:
            bucket = part.leaving(step) if part.place == 0 and part.shared == shared else None
            if bucket is None:
                continue
            self._make_room(part, bucket)
            places = part.in_place[bucket]
            for message, tensor, there in zip(part.buckets[bucket], part.tensors[bucket], places, strict=True):
                if there is None:
                    for block, numbers in _blocks_in(tensor, message):
                        numbers.copy_(self._held.view(block))

    def _unpack(self, step: int) -> None:
        """Copies the buckets received in a step to the targets, unless they were received in place."""
        for part in self.parts:
            bucket = part.arriving(step)
            if bucket is None:
                continue
            for message, tensor in zip(part.buckets[bucket], part.tensors[bucket], strict=True):
                for block, numbers in _blocks_in(tensor, message):
                    for target in self._targets_with(block):
                        view = target.view(block)
                        if view.data_ptr() != numbers.data_ptr():  # else received in place
                            view.copy_(numbers)

    def _targets_with(self, block: Block) -> list["_Local"]:
        return [target for target in self.targets.values() if target.has(block)]

    def _make_room(self, part: "_Part", bucket: int) -> None:
        """Assigns memory to every message of a bucket; it reuses the buffer of the second-last bucket."""
        part.tensors.pop(bucket - 2, None)
        if part.shared:
            part.buffers[bucket] = part.buffers[bucket % 2]
        elif bucket not in part.buffers and bucket - 2 not in part.buffers:
            most = max(part.packed_numbers(number) for number in range(bucket, len(part.buckets), 2))
            part.buffers[bucket] = torch.empty(most, dtype=self.dtype, device=self.device)
            buffers = [buffer for each in self.parts if not each.shared for buffer in each.buffers.values()]
            extra_bytes = self.slot_bytes + sum(buffer.nbytes for buffer in buffers)
            self.peak_extra_bytes = max(self.peak_extra_bytes, extra_bytes)
        elif bucket - 2 in part.buffers:
            part.buffers[bucket] = part.buffers.pop(bucket - 2)
        start, tensors = 0, []
        for message, there in zip(part.buckets[bucket], part.in_place[bucket], strict=True):
            size = 0 if there is not None else numbers_of(message)
            tensors.append(part.buffers[bucket][start : start + size] if there is None else there)
            start += size
        part.tensors[bucket] = tensors

    def _in_place(self, part: "_Part", bucket: int, message: Packet) -> Tensor | None:
        """Returns a message as a view of a parameter, to be sent or received in place; None if it must be packed
        because it has several blocks or its block is not contiguous."""
        first = part.place == 1 and bucket == 0  # received after `start`, when targets may still be in use
        if part.shared or first or len(message) > 1 or message[0].num_numbers < self.direct_numbers:
            return None
        for place in [self._held] if part.place == 0 else self._targets_with(message[0]):
            view = place.view(message[0])
            if view.is_contiguous() and view.device == self.device:
                return view.view(-1)
        return None

    def _copy_local(self, blocks: Iterable[tuple[Block, "_Local"]]) -> None:
        for block, target in blocks:
            target.view(block).copy_(self._held.view(block))


def slot_bytes(plan: Reallocation, rank: int, bucket_bytes: int) -> int:
    """Returns the bytes of a rank's part of an arena: the slots of each route that begins there."""
    numbers = plan.bucket_numbers(bucket_bytes)
    slots = [plan.slot_numbers(route, numbers) for route in plan.routes if route.ranks[0] == rank]
    return sum(map(sum, slots)) * plan.bytes_per_number


def _slots(plan: Reallocation, arena: Arena, bucket_bytes: int) -> dict[Route, list[Tensor]]:
    """Returns the slots of every route whose ranks share memory, consecutive in the part of its first rank."""
    numbers, used, slots = plan.bucket_numbers(bucket_bytes), dict.fromkeys(arena.parts, 0), {}
    for route in plan.routes:
        if not arena.holds(route.ranks):
            continue
        first, sizes = route.ranks[0], [n * plan.bytes_per_number for n in plan.slot_numbers(route, numbers)]
        if used[first] + sum(sizes) <= len(arena.parts[first]):
            slots[route] = list(arena.parts[first][used[first] : used[first] + sum(sizes)].split(sizes))
            used[first] += sum(sizes)
    return slots


def _token() -> Tensor:
    """Returns a notification about a slot; its arrival is the message."""
    return torch.zeros(1, dtype=torch.uint8)


def _blocks_in(numbers: Tensor, message: Packet) -> Iterator[tuple[Block, Tensor]]:
    """Yields the blocks of a message, each with its part of the message as a matrix."""
    start = 0
    for block in message:
        (r0, r1), (c0, c1) = block.rows, block.columns
        yield block, numbers[start : start + block.num_numbers].view(r1 - r0, c1 - c0)
        start += block.num_numbers


@dataclass(slots=True)
class _Part:
    """This rank's part of a route, at `place` in the chain."""

    route: Route
    tag: int
    place: int
    buckets: tuple[Bucket, ...]
    in_place: list[list[Tensor | None]] = field(default_factory=list)  # of every bucket the messages; None: packed
    buffers: dict[int, Tensor] = field(default_factory=dict)  # bucket -> buffer of its packed messages; at most two
    tensors: dict[int, list[Tensor]] = field(default_factory=dict)  # bucket -> its messages; the same buckets
    shared: bool = False  # all its ranks see the buffers of the first

    @property
    def num_steps(self) -> int:
        """Steps until this rank has finished."""
        if self.shared:  # the first rank also receives the confirmation of the last bucket
            return len(self.buckets) + (self.place == 0)
        last = self.place == len(self.route.ranks) - 1
        return len(self.buckets) + self.place - last

    def packed_numbers(self, bucket: int) -> int:
        """Returns the numbers of a bucket that are packed into a buffer."""
        pairs = zip(self.buckets[bucket], self.in_place[bucket], strict=True)
        return sum(numbers_of(message) for message, there in pairs if there is None)

    def arriving(self, step: int) -> int | None:
        """Returns the bucket that this rank receives in a step."""
        bucket = step if self.shared else step - self.place + 1
        return bucket if self.place > 0 and 0 <= bucket < len(self.buckets) else None

    def leaving(self, step: int) -> int | None:
        """Returns the bucket that this rank sends in a step."""
        bucket, last = step - self.place, self.place == len(self.route.ranks) - 1
        return bucket if not last and 0 <= bucket < len(self.buckets) else None


class _Local:
    """Tensors of one holding, addressed by blocks of the whole model."""

    def __init__(self, weights: Mapping[str, Weight], holding: Holding, tensors: Mapping[str, Tensor]):
        self.weights, self.holding, self.tensors = weights, holding, tensors
        self.boxes = {name: box for name, weight in weights.items() if (box := weight.box(holding.shard))}

    def has(self, block: Block) -> bool:
        """Returns whether the shard contains a block."""
        mine, box = self.boxes.get(block.weight), ((block.layer, block.layer + 1), block.rows, block.columns)
        return mine is not None and overlap(mine, box) == box

    def view(self, block: Block) -> Tensor:
        """Returns the block as a matrix that shares memory with the parameter."""
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
