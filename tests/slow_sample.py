"""The tree draw of kernels/sample.py, written plainly with Python numbers and lists: the slow twin of sample_ref."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

FANOUT, BLOCK = 8, 512


def slow_draw(probabilities: Sequence[float], uniform: float) -> int:
    """The token that one uniform number draws."""
    num_blocks = -(-len(probabilities) // BLOCK)
    size = BLOCK  # of the smallest tree that holds the blocks
    while size < num_blocks * BLOCK:
        size *= FANOUT
    first, level = 0, 0
    while size > 1:
        size //= FANOUT
        masses = [sum(probabilities[first + c * size : first + (c + 1) * size]) for c in range(FANOUT)]
        number = uniform if level == 0 else hashed(uniform, level)
        child = next(c for c, below in enumerate(accumulate(masses)) if below > number * sum(masses))
        first, level = first + child * size, level + 1
    return first


def hashed(uniform: float, level: int) -> float:
    x = int(np.float32(uniform).view(np.uint32)) ^ (level * 0x9E3779B9 % 2**32)
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return ((x ^ x >> 16) >> 8) / 2**24
