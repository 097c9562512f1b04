"""Cuts the data of a route into buckets and packets. Sender and receiver cut alike, from the plan alone.

A *block* is some rows of one parameter. A *packet* is one message on the wire: a large block by itself, so that it may
leave from, and arrive in, the parameter's own memory, or several small blocks. A bucket is what one step of a route
carries.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from rlhf_spmd.plan.program.tensors import Box, Piece, Range, box_of

DIRECT_BYTES = 256 * 2**10  # a block of this size is worth a message of its own: copying it costs more


@dataclass(frozen=True, slots=True)
class Block:
    """Rows and columns of one layer's parameter, counted in the whole model."""

    weight: str
    layer: int
    rows: Range
    columns: Range

    @property
    def num_numbers(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


Packet = tuple[Block, ...]
Bucket = tuple[Packet, ...]


def numbers_of(packet: Packet) -> int:
    """Returns how many numbers a packet carries."""
    return sum(block.num_numbers for block in packet)


def cut_into_buckets(pieces: Iterable[Piece], *, numbers: int, direct_numbers: int) -> tuple[Bucket, ...]:
    """Cuts pieces into buckets of at most so many numbers. Blocks of direct_numbers or more are packets; smaller
    neighbours share one.

    A block consists of whole rows, unless a row is longer than a bucket.
    """
    buckets: list[list[list[Block]]] = []
    room, open_packet = 0, False
    for whole in _blocks(pieces, numbers):
        rest: Block | None = whole
        while rest is not None:
            block = rest
            if buckets and room < min(block.num_numbers, max(direct_numbers, _width(block))):
                room = 0  # what would fit is not worth a packet
            if room == 0:
                buckets.append([])
                room, open_packet = numbers, False
            block, rest = _first_rows(block, room // _width(block))
            large = block.num_numbers >= direct_numbers
            if open_packet and not large:
                buckets[-1][-1].append(block)
            else:
                buckets[-1].append([block])
            open_packet, room = not large, room - block.num_numbers
    return tuple(tuple(map(tuple, bucket)) for bucket in buckets)


def num_packets(pieces: Iterable[Piece], *, numbers: int, direct_numbers: int) -> int:
    """Returns how many packets these pieces make; it follows from their sizes, which many routes have in common."""
    at_zero = tuple(box_of((0, last - first) for first, last in piece.box) for piece in pieces)
    return _num_packets(at_zero, numbers, direct_numbers)


@lru_cache(maxsize=4096)
def _num_packets(boxes: tuple[Box, ...], numbers: int, direct_numbers: int) -> int:
    pieces = [Piece("", box) for box in boxes]
    return sum(map(len, cut_into_buckets(pieces, numbers=numbers, direct_numbers=direct_numbers)))


def _blocks(pieces: Iterable[Piece], numbers: int) -> Iterator[Block]:
    """Yields the pieces layer by layer; rows longer than a bucket one by one and in parts."""
    for piece in pieces:
        layers, rows, (left, right) = piece.box
        for layer in range(*layers):
            if right - left <= numbers:
                yield Block(piece.weight, layer, rows, (left, right))
                continue
            for row in range(*rows):
                for start in range(left, right, numbers):
                    yield Block(piece.weight, layer, (row, row + 1), (start, min(start + numbers, right)))


def _width(block: Block) -> int:
    return block.columns[1] - block.columns[0]


def _first_rows(block: Block, num_rows: int) -> tuple[Block, Block | None]:
    """Splits a block into its first rows and the rest."""
    first, last = block.rows
    if num_rows >= last - first:
        return block, None
    middle = first + num_rows
    return replace(block, rows=(first, middle)), replace(block, rows=(middle, last))
