"""Inverse-CDF sampling: the right token for a given uniform, and never an impossible one."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_spmd.kernels.philox import uniforms
from rlhf_spmd.kernels.sample import BLOCK, edge_distances, sample_ref

LARGEST = float(np.float32(1 - 2**-24))  # the largest uniform there is
SHAPES = [(1, 1), (3, 2), (5, 17), (4, BLOCK - 1), (4, BLOCK), (4, BLOCK + 1), (16, 1024), (7, 3 * BLOCK + 129)]


def random_logits(num_rows: int, vocab_size: int, *, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return scale * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def draw(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(uniforms(seed, 0, np.arange(num_rows), np.zeros(num_rows, int), 1)[:, 0])


@pytest.mark.parametrize(("num_rows", "vocab_size"), SHAPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_token_brackets_the_uniform(num_rows, vocab_size, temperature):
    """cdf(token - 1) <= u < cdf(token) by a plain float64 CDF, up to rounding; the logprob is the softmax's."""
    logits_BV = random_logits(num_rows, vocab_size)
    uniforms_B = draw(num_rows)
    tokens_B, logprobs_B = sample_ref(logits_BV, uniforms_B, temperature)
    assert tokens_B.dtype == torch.int64 and logprobs_B.dtype == torch.float32
    exact_BV = (logits_BV.double() / temperature).log_softmax(dim=1)
    cdf_BV = exact_BV.exp().cumsum(dim=1)
    rows_B = torch.arange(num_rows)
    mass_B = exact_BV.exp()[rows_B, tokens_B]
    assert (cdf_BV[rows_B, tokens_B] > uniforms_B - 1e-6).all()
    assert (cdf_BV[rows_B, tokens_B] - mass_B <= uniforms_B + 1e-6).all()
    torch.testing.assert_close(logprobs_B.double(), exact_BV[rows_B, tokens_B], atol=2e-6, rtol=1e-6)


def test_distribution():
    """Chi-square of 10,000 draws from 6 tokens, at two temperatures."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -torch.inf])
    num = 10_000
    for temperature, seed in ((1.0, 1), (0.5, 2)):
        tokens_B, _ = sample_ref(logits.expand(num, 6), draw(num, seed), temperature)
        expected = num * (logits / temperature).softmax(0)[:5].double()
        counts = torch.bincount(tokens_B, minlength=6).double()
        assert counts[5] == 0
        assert ((counts[:5] - expected).square() / expected).sum() < 18.5  # 4 degrees of freedom, 0.1%


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_statistics_are_at_least_float32(dtype):
    logits_BV = random_logits(6, 700).to(dtype)
    tokens_B, logprobs_B = sample_ref(logits_BV, draw(6), 0.7)
    tokens32_B, logprobs32_B = sample_ref(logits_BV.float(), draw(6), 0.7)
    assert logprobs_B.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(tokens_B, tokens32_B)
    torch.testing.assert_close(logprobs_B.float(), logprobs32_B)


@given(data=st.data(), vocab_size=st.integers(2, 3 * BLOCK), num_allowed=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_banned_tokens_are_never_drawn(data, vocab_size, num_allowed):
    """min_new_tokens: a logit of -inf is impossible, also at both ends of the uniforms' range."""
    allowed = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=num_allowed))
    logits = torch.full((vocab_size,), -torch.inf)
    values = st.lists(st.floats(-80, 80), min_size=len(allowed), max_size=len(allowed))
    logits[allowed] = torch.tensor(data.draw(values))
    uniforms_B = torch.tensor([0.0, 2**-24, 0.25, 0.5, LARGEST, 1.0])
    tokens_B, logprobs_B = sample_ref(logits.expand(6, -1), uniforms_B, 1.0)
    assert set(tokens_B.tolist()) <= set(allowed)
    assert (logprobs_B <= 1e-6).all() and logprobs_B.isfinite().all()


def test_edges_of_the_cdf():
    """Equal logits over V tokens: u = k / V is the first uniform that draws token k."""
    for vocab_size in (2, 4 * BLOCK):
        k = torch.arange(vocab_size)
        logits_BV = torch.zeros(vocab_size, vocab_size)
        assert torch.equal(sample_ref(logits_BV, k / vocab_size)[0], k)
        below = torch.nextafter((k[1:] / vocab_size), torch.tensor(0.0))
        assert torch.equal(sample_ref(logits_BV[1:], below)[0], k[1:] - 1)
    # A uniform near 1 with a tail of zero probability behind the last possible token.
    logits_1V = torch.full((1, 2 * BLOCK + 5), -200.0)
    logits_1V[0, 3] = logits_1V[0, BLOCK + 1] = 0.0
    assert sample_ref(logits_1V, torch.tensor([LARGEST]))[0].item() == BLOCK + 1
    assert sample_ref(logits_1V, torch.tensor([0.0]))[0].item() == 3


def test_rows_are_independent():
    """Batch size, neighbours and numpy or torch uniforms change no bit; no gradient is recorded."""
    logits_BV, uniforms_B = random_logits(9, 1300).requires_grad_(), draw(9)
    tokens_B, logprobs_B = sample_ref(logits_BV, uniforms_B.numpy(), 0.9)
    for b in range(9):
        token, logprob = sample_ref(logits_BV[b : b + 1], uniforms_B[b : b + 1], 0.9)
        assert token == tokens_B[b] and logprob == logprobs_B[b]
    assert not logprobs_B.requires_grad
    empty_tokens, empty_logprobs = sample_ref(logits_BV[:0], uniforms_B[:0], 0.9)
    assert empty_tokens.shape == empty_logprobs.shape == (0,)


def test_broken_rows_stay_in_range():
    logits_BV = random_logits(4, 600)
    logits_BV[0, 5], logits_BV[1, 599], logits_BV[2] = torch.nan, torch.inf, -torch.inf
    tokens_B, logprobs_B = sample_ref(logits_BV, torch.full((4,), LARGEST))
    assert ((tokens_B >= 0) & (tokens_B < 600)).all()
    assert logprobs_B[:3].isnan().all() and logprobs_B[3].isfinite()
    with pytest.raises(AssertionError, match="argmax"):
        sample_ref(logits_BV, torch.zeros(4), 0.0)


def test_input_is_untouched():
    logits_BV = random_logits(2, 2 * BLOCK)
    before_BV = logits_BV.clone()
    sample_ref(logits_BV, draw(2), 1.0)
    assert torch.equal(logits_BV, before_BV)


def test_speed():
    """A few milliseconds for a real vocabulary; the bound is loose, because machines are shared."""
    logits_BV, uniforms_B = random_logits(32, 49152), draw(32)
    best_s = float("inf")
    for _ in range(5):
        start_s = time.perf_counter()
        sample_ref(logits_BV, uniforms_B, 0.7)
        best_s = min(best_s, time.perf_counter() - start_s)
    assert best_s < 0.1


def test_beyond_its_edge_a_uniform_draws_another_token():
    logits_BV, uniforms_B = random_logits(40, 700), draw(40).double()
    tokens_B, _ = sample_ref(logits_BV, uniforms_B, 0.7)
    distances_B = edge_distances(logits_BV, uniforms_B, tokens_B, 0.7)
    assert (distances_B > 0).all() and (distances_B < 0.5).all()
    for factor, moves in ((0.99, False), (1.01, True)):
        drawn = [sample_ref(logits_BV, uniforms_B + sign * factor * distances_B, 0.7)[0] for sign in (-1, 1)]
        other_B = (drawn[0] != tokens_B) | (drawn[1] != tokens_B)
        assert (other_B == moves).all()
    other_B = (tokens_B + 1) % 700
    assert (edge_distances(logits_BV, uniforms_B, other_B, 0.7) < 0).all()
