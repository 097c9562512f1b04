"""Philox4x32-10 against the published known answers, and the random bits that sampling uses."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_spmd.kernels.philox import philox_uint32, random_bits

# Random123 1.14, tests/kat_vectors: counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
WORD = st.integers(0, 2**32 - 1)


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def philox_python(seed: int, counter: list[int]) -> list[int]:
    """Computes the same formula on Python integers."""
    c, k = list(counter), [seed % 2**32, seed >> 32]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k[0], p1 % 2**32, p0 >> 32 ^ c[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_known_answers(counter, key, output):
    low, high = words(key)
    out = philox_uint32(low | high << 32, *words(counter))
    assert out.dtype == np.uint32
    assert out.tolist() == words(output)


@given(seed=st.integers(0, 2**64 - 1), counter=st.lists(WORD, min_size=4, max_size=4))
@settings(max_examples=50, deadline=None)
def test_equals_python_integers(seed, counter):
    assert philox_uint32(seed, *counter).tolist() == philox_python(seed, counter)


def test_random_bits_do_not_depend_on_company():
    """Row 22: a token's bits depend on what they are for, not on the batch, its order or the length asked for."""
    prompts, samples = np.array([5, 9, 9, 2**32 - 1]), np.array([0, 0, 1, 3])
    all_BG = random_bits(1234, 130, 7, prompts, samples, 13)
    assert all_BG.shape == (4, 13) and all_BG.dtype == np.int64
    for b in (3, 1):
        assert (random_bits(1234, 130, 7, prompts[b : b + 1], samples[b : b + 1], 6)[0] == all_BG[b, :6]).all()
    first, second, _, _ = philox_python(1234, [9, 1, 130 * 2**24 + 12, 7])
    assert int(all_BG[2, 12]) % 2**64 == first + second * 2**32
    assert random_bits(1234, 130, 7, [], [], 3).shape == (0, 3)


def test_every_index_matters():
    def words(seed: int, stream: int, iteration: int, prompt: int, sample: int, first: int = 0) -> list[int]:
        bits_G = random_bits(seed, stream, iteration, [prompt], [sample], first + 2)[0, first:]
        return (bits_G % 2**32).tolist() + (bits_G >> 32).tolist()

    base = words(1, 5, 2, 3, 4)
    others = [words(0, 5, 2, 3, 4), words(1 + 2**32, 5, 2, 3, 4), words(1, 4, 2, 3, 4), words(1, 5, 3, 3, 4)]
    others += [words(1, 5, 2, 4, 4), words(1, 5, 2, 3, 3), words(1, 5, 2, 3, 4, first=2)]
    assert all(mine != theirs for other in others for mine, theirs in zip(base, other, strict=True))
