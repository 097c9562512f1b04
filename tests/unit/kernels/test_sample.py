"""Inverse-CDF sampling: the right token for given random bits, and never an impossible one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_spmd.kernels.cdf_tree import BLOCK, level_uniforms
from rlhf_spmd.kernels.sample import sample, sample_ref
from tests.draws import bits_of, random_rows
from tests.edges import edge_distances
from tests.slow_sample import slow_draw

LARGEST = 1 - 2**-32  # the largest number of a level
SHAPES = [(1, 1), (3, 2), (5, 17), (4, BLOCK - 1), (4, BLOCK), (4, BLOCK + 1), (16, 1024), (7, 3 * BLOCK + 129)]


def random_logits(num_rows: int, vocab_size: int, *, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return scale * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def drawn(logits_BV, bits_B, temperature: float = 1.0, form=sample):
    return form(logits_BV, bits_B, temperature=temperature)[:2]


@pytest.mark.parametrize("form", [sample, sample_ref])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [*SHAPES, (2, 9 * BLOCK + 3)])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_equals_the_slow_twin(form, num_rows, vocab_size, temperature):
    logits_BV = random_logits(num_rows, vocab_size)
    bits_B = random_rows(num_rows)
    tokens_B, logprobs_B = drawn(logits_BV, bits_B, temperature, form)
    assert tokens_B.dtype == torch.int64 and logprobs_B.dtype == torch.float32
    exact_BV = (logits_BV.double() / temperature).log_softmax(dim=1)
    expected = [slow_draw(row, bits) for row, bits in zip(exact_BV.exp().tolist(), bits_B.tolist(), strict=True)]
    assert tokens_B.tolist() == expected
    torch.testing.assert_close(logprobs_B.double(), exact_BV[torch.arange(num_rows), tokens_B], atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_statistics_are_at_least_float32(dtype):
    logits_BV = random_logits(6, 700).to(dtype)
    tokens_B, logprobs_B = drawn(logits_BV, random_rows(6), 0.7)
    tokens32_B, logprobs32_B = drawn(logits_BV.float(), random_rows(6), 0.7)
    assert logprobs_B.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(tokens_B, tokens32_B)
    torch.testing.assert_close(logprobs_B.float(), logprobs32_B)


@given(data=st.data(), vocab_size=st.integers(2, 3 * BLOCK), num_allowed=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_banned_tokens_are_never_drawn(data, vocab_size, num_allowed):
    """min_new_tokens: a logit of -inf is impossible, also at both ends of both words' range."""
    allowed = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=num_allowed))
    logits = torch.full((vocab_size,), -torch.inf)
    values = st.lists(st.floats(-80, 80), min_size=len(allowed), max_size=len(allowed))
    logits[allowed] = torch.tensor(data.draw(values))
    ends = torch.tensor([0, 1, 2**31, 2**32 - 1])
    bits_B = (ends[:, None] | ends << 32).flatten()
    tokens_B, logprobs_B = drawn(logits.expand(16, -1), bits_B, 1.0)
    assert set(tokens_B.tolist()) <= set(allowed)
    assert (logprobs_B <= 1e-6).all() and logprobs_B.isfinite().all()


def test_many_tokens_are_drawn_as_often_as_they_should_be():
    """Chi-square over 1,100 tokens of very unequal masses, and over the tokens of one group of eight."""
    logits, num = random_logits(1, 1100, scale=1.5)[0], 100_000
    tokens_B = torch.cat([drawn(logits.expand(10_000, -1), bits)[0] for bits in random_rows(num, seed=5).split(10_000)])
    counts = torch.bincount(tokens_B, minlength=1100).double()
    expected = num * logits.double().softmax(0)
    for tokens in (slice(None), slice(8, 16)):
        share = expected[tokens] / expected[tokens].sum() * counts[tokens].sum()
        often = share > 5
        square = float(((counts[tokens] - share).square() / share)[often].sum())
        degrees = int(often.sum()) - 1
        assert abs(square - degrees) < 4 * (2 * degrees) ** 0.5


def test_edges_of_the_blocks():
    """Equal logits over eight blocks: u_0 = k / 8 is the first number that draws a token of block k."""
    k = torch.arange(8)
    logits_BV = torch.zeros(8, 8 * BLOCK)
    assert torch.equal(drawn(logits_BV, bits_of(k / 8))[0] // BLOCK, k)
    below = bits_of(k[1:] / 8) - 1
    assert torch.equal(drawn(logits_BV[1:], below)[0] // BLOCK, k[1:] - 1)
    # A number near 1 with a tail of zero probability behind the last possible token.
    logits_1V = torch.full((1, 2 * BLOCK + 5), -200.0)
    logits_1V[0, 3] = logits_1V[0, BLOCK + 1] = 0.0
    assert drawn(logits_1V, bits_of([LARGEST]))[0].item() == BLOCK + 1
    assert drawn(logits_1V, bits_of([0.0]))[0].item() == 3


def test_broken_rows_stay_in_range():
    logits_BV = random_logits(4, 600)
    logits_BV[0, 5], logits_BV[1, 599], logits_BV[2] = torch.nan, torch.inf, -torch.inf
    tokens_B, logprobs_B = drawn(logits_BV, bits_of([LARGEST] * 4))
    assert ((tokens_B >= 0) & (tokens_B < 600)).all()
    assert logprobs_B[:3].isnan().all() and logprobs_B[3].isfinite()
    greedy = sample(logits_BV, bits_of([LARGEST] * 4), temperature=0.0, num_stored=2)
    assert ((greedy.tokens_B >= 0) & (greedy.tokens_B < 600)).all()
    for numbers_B in greedy[1:4]:
        assert numbers_B[:3].isnan().all() and numbers_B[3].isfinite()


def test_only_tokens_near_an_edge_flip_and_few_of_them():
    """Logits that move by at most e move an edge by at most e / 2. One CDF over all would flip many times more."""
    num, noise = 8_000, 1e-3
    logits_BV, bits_B = random_logits(num, 700), random_rows(num, seed=7)
    moved_BV = logits_BV + noise * (2 * torch.rand(num, 700, generator=torch.Generator().manual_seed(8)) - 1)
    tokens_B, flipped_B = drawn(logits_BV, bits_B)[0], drawn(moved_BV, bits_B)[0]
    distances_B = edge_distances(logits_BV, bits_B, tokens_B)
    assert (distances_B > -1e-6).all()
    flips_B = tokens_B != flipped_B
    assert flips_B.any() and (distances_B[flips_B] < noise / 2 + 1e-6).all()
    assert (edge_distances(logits_BV, bits_B, flipped_B)[flips_B] < 0).all()
    numbers_B1 = level_uniforms(bits_B, 1)
    cdf_BV, moved_cdf_BV = (x.double().softmax(1).cumsum(1) for x in (logits_BV, moved_BV))
    plain_B = ((cdf_BV <= numbers_B1).sum(1)) != ((moved_cdf_BV <= numbers_B1).sum(1))
    assert 5 * flips_B.sum() < plain_B.sum()


def test_greedy_takes_the_lowest_of_equals():
    logits_BV = random_logits(50, 1300).bfloat16()
    logits_BV[:, 700] = logits_BV[:, 3] = logits_BV.amax(1) + 1
    logits_BV[7, 3] = 0
    sampled = sample(logits_BV, random_rows(50), temperature=0.0)
    assert torch.equal(sampled.tokens_B, logits_BV.float().argmax(1))
    assert sampled.tokens_B[6] == 3 and sampled.tokens_B[7] == 700
    assert (sampled.logprobs_B == 0).all()
    full_BV = logits_BV.float().log_softmax(1)
    torch.testing.assert_close(sampled.full_logprobs_B, full_BV.amax(1), atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(sampled.support_mass_B, full_BV.amax(1).exp(), atol=2e-6, rtol=1e-5)
