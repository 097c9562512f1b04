"""How the weights of a shard lie in flat buffers, and the buckets in which its replicas sum their gradients.

Weights of one kind are next to each other, in the order of the model, and begin at a number that the replicas can share
evenly: matrices, vectors, and what slices or stages sum as well, whose parts are then alike on all of these.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from rlhf_spmd.model.parallel import is_split
from rlhf_spmd.plan.cost.memory import BUCKET_NUMEL
from rlhf_spmd.runtime.engines.adamw import Interval

ALIGNED = 128  # of so many numbers the part of a replica is a multiple, but for the last one
TIED = "embed_tokens.weight"  # on the first and the last stage if embeddings are tied


@dataclass(frozen=True, slots=True)
class Bucket:
    """An interval of the flat buffers, which replicas sum at a time; each owns an equal part of it.

    whole: slices have the same weights there, and sum their gradients, too.
    tied: the first and the last stage have the same weight there, and sum its gradients, too.
    """

    start: int
    stop: int
    whole: bool
    tied: bool

    @property
    def interval(self) -> slice:
        """Its place in the flat buffers."""
        return slice(self.start, self.stop)

    def parts(self, replicas: int) -> list[slice]:
        """Returns the places of the parts in the flat buffers, by replica."""
        size = (self.stop - self.start) // replicas
        return [slice(start, start + size) for start in range(self.start, self.start + size * replicas, size)]


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Where weights lie in flat buffers of `numel` numbers. buckets: in the order in which they are sent."""

    names: list[str]
    weights: list[Tensor]
    offsets: list[int]
    numel: int
    buckets: list[Bucket]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Returns the places of the weights in a flat buffer, in their shapes."""
        places = zip(self.weights, self.offsets, strict=True)
        return [flat[offset : offset + p.numel()].view_as(p) for p, offset in places]

    def intervals(self, part: slice) -> Iterator[tuple[int, Interval, int]]:
        """Yields the intervals of weights in a part of the flat buffers: the weight's index, the interval, and where it
        begins in the part."""
        for index in range(max(0, bisect_right(self.offsets, part.start) - 1), len(self.names)):
            offset = self.offsets[index]
            if offset >= part.stop:
                return
            first, last = max(offset, part.start), min(offset + self.weights[index].numel(), part.stop)
            if first < last:
                yield index, (self.names[index], first - offset, last - offset), first - part.start


def lay_out(named: Sequence[tuple[str, Tensor]], *, replicas: int, in_slices: bool, is_tied: bool) -> FlatLayout:
    """Lays out weights, in the order of the model.

    in_slices: whether tp splits the model.
    is_tied: whether TIED is on two stages.
    Backward completes the gradients of the last layers first, so the buckets of a kind are sent from its end.
    """

    def kind(item: tuple[str, Tensor]) -> tuple[bool, bool, bool]:
        name, weight = item
        return in_slices and not is_split(name), is_tied and name == TIED, weight.dim() < 2

    items = sorted(named, key=kind)
    step = max(1, BUCKET_NUMEL // (ALIGNED * replicas)) * ALIGNED * replicas
    offsets: list[int] = []
    buckets: list[Bucket] = []
    end = 0
    for (whole, tied, _), alike in groupby(items, key=kind):
        start = end
        for _, weight in alike:
            offsets.append(end)
            end += weight.numel()
        end += -(end - start) % replicas
        stops = range(end, start, -step)
        buckets += [Bucket(max(start, stop - step), stop, whole, tied) for stop in stops]
    return FlatLayout([name for name, _ in items], [p for _, p in items], offsets, end, buckets)
