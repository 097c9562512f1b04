"""The tree draw of kernels/sample.py with plain Python numbers and lists: the slow twin of sample_ref."""

from collections.abc import Sequence
from itertools import accumulate

FANOUT, BLOCK = 8, 512


def slow_draw(probabilities: Sequence[float], bits: int) -> int:
    """Returns the token that 64 random bits draw."""
    num_blocks = -(-len(probabilities) // BLOCK)
    size = BLOCK  # of the smallest tree that holds the blocks
    while size < num_blocks * BLOCK:
        size *= FANOUT
    first, level = 0, 0
    while size > 1:
        size //= FANOUT
        masses = [sum(probabilities[first + c * size : first + (c + 1) * size]) for c in range(FANOUT)]
        number = slow_number(bits, level)
        child = next(c for c, below in enumerate(accumulate(masses)) if below > number * sum(masses))
        first, level = first + child * size, level + 1
    return first


def slow_number(bits: int, level: int) -> float:
    """Returns the number of one level."""
    second, first = divmod(bits % 2**64, 2**32)
    if level == 0:
        return first / 2**32
    x = second ^ (level * 0x9E3779B9 % 2**32)
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return (x ^ x >> 16) / 2**32
