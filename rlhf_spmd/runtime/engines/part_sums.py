"""Sums of gradients over replicas, by buckets: after the backward passes, or while they run (ZeRO 2).

A bucket is sent as soon as it and those before it are complete, so all replicas send in one order, which communicators
that work in order need. What a pass gives no gradient counts as 0.

Between nodes, replicas on one node add first, and each sends on what those with its place on other nodes own. So a
number crosses the network once for every other node, not for every rank there.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.runtime.engines.flat_layout import FlatLayout


class Sender:
    """Sends buckets to the replicas that own their parts, and sums the parts that come from these."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], parts: list[Tensor], *, adds: bool):
        """groups: row and column of this rank in the grid of the replicas; one of them if it has one row or column.

        parts: this rank's part of each bucket, which is set to its sum, or to which that is added.
        """
        self._groups, self._parts, self._adds = groups, parts, adds
        self._under_way: list[Iterator[bool]] = []  # the last bucket, and the one before if there are two groups

    def send(self, index: int, numbers: Tensor) -> None:
        """Sends a bucket, and sums those before, which have been under way meanwhile."""
        self._under_way.insert(0, self._sum(index, numbers))
        self._go_on()

    def finish(self) -> None:
        """Sums the buckets that are under way."""
        while self._under_way:
            self._go_on()

    def _go_on(self) -> None:
        """Sums the parts received in a group, and sends the sum in the next one."""
        self._under_way = [sums for sums in self._under_way if next(sums, False)]

    def _sum(self, index: int, numbers: Tensor) -> Iterator[bool]:
        """Sums a bucket in each group, in the order of the ranks; yields when it has been sent there."""
        part = self._parts[index]
        for group in self._groups:
            # by receiver in this group: the parts that it owns, or sends in the next one
            numbers = numbers.view(-1, group.size(), part.numel()).transpose(0, 1).contiguous()
            received = torch.empty_like(numbers)
            work = dist.all_to_all_single(received, numbers, group=group, async_op=True)
            yield True
            work.wait()
            numbers = _summed(received)
        if self._adds:
            numbers.add_(part)
        part.copy_(numbers)


class PartSums:
    """The gradients of a step under ZeRO 2, of which this rank keeps its parts.

    each: whether every micro-batch is sent; else several are added up in whole gradients, which are sent with the last
    one. A single one is sent without.
    """

    def __init__(self, layout: FlatLayout, groups: Sequence[dist.ProcessGroup], parts: list[Tensor], *, each: bool):
        self._layout, self._parts, self._each = layout, parts, each
        self._sender = Sender(groups, parts, adds=True)
        self._weights = [{index for index, *_ in layout.intervals(bucket.interval)} for bucket in layout.buckets]
        self._whole: list[Tensor] | None = None  # of each weight
        self._flat: Tensor | None = None  # which these are views of
        for index, weight in enumerate(layout.weights):
            weight.register_post_accumulate_grad_hook(lambda _, index=index: self._complete(index))

    def begin_pass(self, *, last: bool) -> None:
        """Begins the backward pass of a micro-batch."""
        self._sends, self._next, self._done = last or self._each, 0, set[int]()
        if not self._sends and self._whole is None:
            self._flat = self._parts[0].new_zeros(self._layout.numel)
            self._whole = self._layout.views(self._flat)

    def end_pass(self) -> None:
        """Sends the buckets with weights that the pass has not read."""
        self._done.update(range(len(self._layout.weights)))
        self._send_complete()

    def finish(self) -> None:
        """Completes the sums of the step."""
        self._sender.finish()
        self._whole = self._flat = None

    def _complete(self, index: int) -> None:
        """Notes that a pass has the gradient of a weight."""
        if self._whole is not None:
            move_gradient(self._layout.weights[index], self._whole[index])
        self._done.add(index)
        self._send_complete()

    def _send_complete(self) -> None:
        while self._sends and self._next < len(self._weights) and self._weights[self._next] <= self._done:
            self._sender.send(self._next, self._numbers(self._layout.buckets[self._next].interval))
            self._next += 1

    def _numbers(self, interval: slice) -> Tensor:
        """Returns the gradients in a bucket, and frees those of weights that begin there: their rest has been sent."""
        if self._flat is not None:
            return self._flat[interval]
        numbers = self._parts[0].new_zeros(interval.stop - interval.start)
        for index, (_, start, stop), offset in self._layout.intervals(interval):
            weight = self._layout.weights[index]
            if weight.grad is not None:
                numbers[offset : offset + stop - start].add_(weight.grad.reshape(-1)[start:stop])
                weight.grad = weight.grad if start else None
        return numbers


def move_gradient(weight: Tensor, into: Tensor) -> None:
    """Adds a micro-batch's gradient to the wide sum as soon as it is complete, and frees it."""
    into.add_(weight.grad)
    weight.grad = None


def _summed(received: Tensor) -> Tensor:
    """Adds the parts received from all ranks, in the order of the ranks, in separate memory."""
    total = received[0].clone()
    for other in received[1:]:
        total.add_(other)
    return total.view(-1)
