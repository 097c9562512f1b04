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

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from rlhf_spmd.kernels.cdf_tree import FANOUT, LEVELS_INSIDE, level_numbers, levels_over

# B words, L levels, F children of a node, E edges between them, V tokens

VOCAB = 131_072
LEVELS = levels_over(VOCAB) + LEVELS_INSIDE
LIMIT = 0.002
CHUNK = 2**14  # words at a time
ENTROPIES = (5, 6, 7, 8)  # nats


def chunks(num: int) -> Iterator[slice]:
    return (slice(start, min(start + CHUNK, num)) for start in range(0, num, CHUNK))


def random_words(rng: np.random.Generator, num: int) -> np.ndarray:
    return rng.integers(0, 2**32, num, dtype=np.uint32).astype(np.int64)


def poisson(num: float) -> int:
    return int(np.random.default_rng(0).poisson(num))


def bound(counts_V: np.ndarray, probs_V: np.ndarray, num: float) -> float:
    """Bounds the total variation, from a sample of Poisson(num) draws."""
    roots_V = np.sqrt(probs_V)
    squares_V = ((counts_V - num * probs_V) ** 2 - counts_V) / num**2
    square = (squares_V / np.maximum(roots_V, 1e-300)).sum() * roots_V.sum()
    return 0.5 * (max(square, 0.0) + 5 * 2**0.5 * roots_V.sum() / num) ** 0.5


def zipf(num: int, steepness: float) -> np.ndarray:
    masses = np.arange(1, num + 1) ** -steepness
    return masses / masses.sum()


def nats(probs_V: np.ndarray) -> float:
    return float(-(probs_V * np.log(np.maximum(probs_V, 1e-300))).sum())


def solved(entropy_of: Callable[[float], float], entropy: float) -> float:
    """Returns the parameter in [0, 20] at which an entropy that falls with it has a value."""
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if entropy_of(middle) > entropy else (low, middle)
    return low


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


# ---- distributions without a structure -------------------------------------------------------------------------------


def distribution(name: str, entropy: float) -> np.ndarray:
    """Returns Zipf's law in random order, or the softmax of Gaussian logits, of so many nats: [V]."""
    rng = np.random.default_rng(int(entropy))
    if name == "zipf":
        return rng.permutation(zipf(VOCAB, solved(lambda steepness: nats(zipf(VOCAB, steepness)), entropy)))
    logits_V = rng.standard_normal(VOCAB)

    def softmax(scale: float) -> np.ndarray:
        masses_V = np.exp(scale * (logits_V - logits_V.max()))
        return masses_V / masses_V.sum()

    return softmax(solved(lambda scale: nats(softmax(scale)), entropy))


def heap_of_edges(probs_V: np.ndarray) -> np.ndarray:
    """Returns the edges of the whole tree as those of a binary one: node k leads to 2k or 2k + 1, three times per
    level."""
    heap = np.ones(FANOUT**LEVELS)
    padded_V = np.zeros(FANOUT**LEVELS)
    padded_V[:VOCAB] = probs_V
    for depth in range(3 * LEVELS):
        in_group = 2 ** (depth % 3)  # nodes of this depth with the same parent in the tree of fan-out 8
        halves = padded_V.reshape(2**depth // in_group, in_group, 2, -1).sum(3)
        before = halves.sum(2).cumsum(1) - halves.sum(2)
        whole = np.maximum(halves.sum((1, 2)), 1e-300)[:, None]
        heap[2**depth : 2 ** (depth + 1)] = ((before + halves[:, :, 0]) / whole).ravel()
    return heap


def drawn_counts(probs_V: np.ndarray, num: int) -> np.ndarray:
    """Returns how often random bits draw each token, [V]."""
    heap, rng = heap_of_edges(probs_V), np.random.default_rng(2)
    counts_V = np.zeros(FANOUT**LEVELS, dtype=np.int64)
    for part in chunks(num):
        first_B, second_B = (random_words(rng, part.stop - part.start) for _ in range(2))
        node_B = np.ones(part.stop - part.start, dtype=np.int64)
        for numbers_B in level_numbers(first_B | second_B << 32, LEVELS).T:
            for _ in range(3):
                node_B += node_B + (numbers_B >= heap.take(node_B))
        counts_V += np.bincount(node_B - FANOUT**LEVELS, minlength=len(counts_V))
    assert not counts_V[VOCAB:].any()
    return counts_V[:VOCAB]


@pytest.mark.slow
@pytest.mark.parametrize("entropy", ENTROPIES)
@pytest.mark.parametrize("name", ["zipf", "gaussian"])
def test_any_distribution_by_a_sample(name, entropy):
    probs_V = distribution(name, entropy)
    assert abs(nats(probs_V) - entropy) < 1e-6
    num = 5 * 2**0.5 * np.sqrt(probs_V).sum() / 1.1e-5  # so that five deviations are 1.1e-5 of 4 * LIMIT**2 = 1.6e-5
    assert bound(drawn_counts(probs_V, poisson(num)), probs_V, num) < LIMIT
