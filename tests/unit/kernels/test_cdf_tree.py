"""The numbers of the levels of the tree, which are made of random bits."""

import numpy as np

from rlhf_spmd.kernels.cdf_tree import LEVELS_INSIDE, level_numbers, levels_over

LEVELS = levels_over(131_072) + LEVELS_INSIDE


def random_words(rng: np.random.Generator, num: int) -> np.ndarray:
    return rng.integers(0, 2**32, num, dtype=np.uint32).astype(np.int64)


def test_each_number_takes_every_value_once():
    """What makes the number of a level of word 1 is a permutation: here is its inverse."""
    words_B = np.concatenate((np.array([0, 1, 2**31, 2**32 - 1]), random_words(np.random.default_rng(0), 10**6)))
    for level, numbers_B in enumerate(level_numbers(words_B << 32, LEVELS).T[1:], start=1):
        x_B = (numbers_B * 2**32).astype(np.uint64)
        for shift, multiplier in ((16, 0xC2B2AE35), (13, 0x85EBCA6B)):
            x_B = unshifted(x_B, shift) * np.uint64(pow(multiplier, -1, 2**32)) & np.uint64(2**32 - 1)
        assert (unshifted(x_B, 16) ^ np.uint64(level * 0x9E3779B9 % 2**32) == words_B.astype(np.uint64)).all()


def unshifted(x_B: np.ndarray, shift: int) -> np.ndarray:
    """Returns the y with y ^ (y >> shift) = x."""
    y_B = x_B
    for _ in range(32 // shift):
        y_B = x_B ^ (y_B >> np.uint64(shift))
    return y_B
