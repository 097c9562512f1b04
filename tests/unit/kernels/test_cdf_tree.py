"""How exactly the random numbers draw a distribution: the total variation over all values that they can have.

A token's number of the top level comes from word 0 of its random bits and all others from word 1, so over the 2**64
values of both words the top level is independent of the rest. Word 0 gives all multiples of 2**-32, which is off by
less than 2**-29; what is measured here is what the 2**32 values of word 1 do to the levels below.

For a flat distribution and for products of one distribution per level all words are enumerated (slow). For others a
sample of words bounds the variation: with r any distribution,

    2 TV = sum_v |q_v - p_v| <= sqrt(sum_v (q_v - p_v)**2 / r_v)                                    (Cauchy-Schwarz)

and where a Poisson number of draws, n on average, has c_v times the token v, ((c_v - n p_v)**2 - c_v) / n**2 estimates
(q_v - p_v)**2 without bias and, at q = p, with the variance 2 p_v**2 / n**2. r is proportional to sqrt(p), which makes
the standard deviation of the sum sqrt(2) (sum_v sqrt(p_v)) / n; five of them are added.
"""

import numpy as np

from rlhf_spmd.kernels.cdf_tree import LEVELS_INSIDE, level_numbers, levels_over

# B words, L levels, F children of a node, E edges between them, V tokens

VOCAB = 131_072
LEVELS = levels_over(VOCAB) + LEVELS_INSIDE


def random_words(rng: np.random.Generator, num: int) -> np.ndarray:
    return rng.integers(0, 2**32, num, dtype=np.uint32).astype(np.int64)


# ---- the numbers of each level ---------------------------------------------------------------------------------------


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
