"""Philox4x32-10, the counter-based random numbers behind every sampled token.

A random number is a function of its use - (seed, stream, iteration, prompt, sample, position) - and not of the rank or
the order of calls, so a run gives the same tokens on any number of ranks and under every strategy. All operations are
on integers, so numpy, torch, a Triton kernel and its interpreter agree bit for bit.

Formula (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011), ten rounds of

    c0, c1, c2, c3 <- hi(M1 c2) ^ c1 ^ k0,  lo(M1 c2),  hi(M0 c0) ^ c3 ^ k1,  lo(M0 c0);   k0, k1 <- k0 + W0, k1 + W1

on 32-bit words, where hi and lo are the halves of the 64-bit product.

Legend: B sequences, G response tokens.
"""

import numpy as np

NUM_ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # M0, M1
WEYL = (0x9E3779B9, 0xBB67AE85)  # W0: golden ratio, W1: sqrt(3) - 1
WORD_MASK = 0xFFFFFFFF
STREAM_BITS, POSITION_BITS = 8, 24  # of the third counter word


def philox_uint32(seed: int, c0, c1, c2, c3) -> np.ndarray:
    """Returns the four output words, uint32 [4, ...], for the 128-bit counters (c0, c1, c2, c3) under the 64-bit key
    `seed`.

    The counters are integers or integer arrays in [0, 2**32) that broadcast against each other; the low half of the
    seed is k0.
    """
    assert 0 <= seed < 2**64, f"seed {seed} is not an unsigned 64-bit number"
    c0, c1, c2, c3 = np.broadcast_arrays(*(_words(counter) for counter in (c0, c1, c2, c3)))
    k0, k1 = seed & WORD_MASK, seed >> 32
    m0, m1 = (np.uint64(multiplier) for multiplier in MULTIPLIERS)
    mask, half = np.uint64(WORD_MASK), np.uint64(32)
    for _ in range(NUM_ROUNDS):
        product0, product1 = m0 * c0, m1 * c2  # 32 x 32 bits fit 64: nothing overflows
        c0, c2 = (product1 >> half) ^ c1 ^ np.uint64(k0), (product0 >> half) ^ c3 ^ np.uint64(k1)
        c1, c3 = product1 & mask, product0 & mask
        k0, k1 = (k0 + WEYL[0]) & WORD_MASK, (k1 + WEYL[1]) & WORD_MASK
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def random_bits(seed: int, stream: int, iteration, prompt_B, sample_B, num_positions: int) -> np.ndarray:
    """Returns the random bits of each response token, int64 [B, G], for global prompt and sample indices.

    iteration: a number, or of each row: [B, 1].
    stream: the purpose of the tokens, in [0, 2**8); numbers of different streams are independent. The key is the seed
        and the counter is (prompt, sample, stream * 2**24 + position, iteration), with at most 2**24 positions. The low
        half of the bits is the first output word, used for the top level of the tree; the high half is the second word,
        used for all other levels (cdf_tree.py).
    """
    assert 0 <= stream < 2**STREAM_BITS, f"stream {stream} exceeds {STREAM_BITS} bits"
    assert 0 <= num_positions <= 2**POSITION_BITS, f"{num_positions} positions exceed {POSITION_BITS} bits"
    prompt_B1, sample_B1 = np.asarray(prompt_B)[:, None], np.asarray(sample_B)[:, None]
    position_1G = (stream << POSITION_BITS) + np.arange(num_positions)[None, :]
    words = philox_uint32(seed, prompt_B1, sample_B1, position_1G, iteration)
    return words[0].astype(np.int64) | words[1].astype(np.int64) << 32


def _words(counter) -> np.ndarray:
    counter = np.asarray(counter)
    assert counter.size == 0 or (counter.min() >= 0 and counter.max() <= WORD_MASK), "a counter word exceeds 32 bits"
    return counter.astype(np.uint64)
