"""Sampling supports and their probabilities against transformers' warpers, on thousands of random rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rlhf_spmd.kernels.sample import sample, sample_ref
from rlhf_spmd.kernels.support import make_rules, support_ref
from tests.draws import random_rows

RULES = {
    "top-k": {"top_k": 20},
    "k = 1": {"top_k": 1},
    "k = V": {"top_k": 10_000},
    "top-p": {"top_p": 0.8, "temperature": 0.7},
    "nearly all": {"top_p": 0.999},
    "tiny p": {"top_p": 1e-6},
    "p = 1": {"top_p": 1.0, "temperature": 1.3},
    "min-p": {"min_p": 0.05, "temperature": 1.5},
    "min-p 1": {"min_p": 1.0},
    "all": {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "wide": {"temperature": 3.0, "top_p": 0.95},
    "cold": {"temperature": 0.05, "top_p": 0.9},
}
SHAPES = [(300, 1), (300, 2), (600, 40), (600, 511), (200, 1777)]


def make_rows(num_rows: int, vocab_size: int, *, dtype=torch.float32, banned: bool = False, seed: int = 0):
    generator = torch.Generator().manual_seed(seed + 10 * vocab_size)
    logits_BV = (2.5 * torch.randn(num_rows, vocab_size, generator=generator)).to(dtype)
    if banned:
        logits_BV[torch.rand(logits_BV.shape, generator=generator) < 0.6] = -torch.inf
        logits_BV[:, vocab_size // 2] = 0.5  # at least one token is left
    return logits_BV, random_rows(num_rows, seed)


def warped(logits_BV, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Returns what transformers makes of the logits: -inf for what is dropped."""
    scores_BV = logits_BV.float()
    if temperature != 1:
        scores_BV = TemperatureLogitsWarper(temperature)(None, scores_BV)
    if top_k:
        scores_BV = TopKLogitsWarper(top_k)(None, scores_BV)
    if top_p < 1:
        scores_BV = TopPLogitsWarper(top_p)(None, scores_BV)
    if min_p:
        scores_BV = MinPLogitsWarper(min_p)(None, scores_BV)
    return scores_BV


def at_an_edge(logits_BV, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, margin=3e-6):
    """Returns rows where rounding decides: a sum within the margin of top_p, or a probability of min_p."""
    z_BV = warped(logits_BV, temperature, top_k).double()
    probs_BV = z_BV.softmax(1).sort(1, descending=True).values
    near_BV = (probs_BV.cumsum(1) - top_p).abs() < margin if top_p < 1 else torch.zeros_like(probs_BV, dtype=torch.bool)
    if 0 < min_p < 1:
        near_BV |= (probs_BV / probs_BV[:, :1] - min_p).abs() < margin
    return near_BV.any(1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, ("banned", "ties", "plain", "banned")[(number + more) % 4])
        for number, name in enumerate(RULES)
        for more in (0, 1)
    ],
)
def test_supports_are_those_of_transformers(name, kind):
    rules, num_judged = RULES[name], 0
    for num_rows, vocab_size in SHAPES:
        dtype = torch.bfloat16 if kind == "ties" else torch.float32
        logits_BV, _ = make_rows(num_rows, vocab_size, dtype=dtype, banned=kind == "banned")
        z_BV = logits_BV.float() / rules.get("temperature", 1.0)
        keep_BV = support_ref(z_BV, make_rules(logits_BV, **(OFF | rules), num_stored=0))
        theirs_BV = warped(logits_BV, **rules) > -torch.inf
        sure_B = ~at_an_edge(logits_BV, **rules)
        num_judged += int(sure_B.sum())
        if kind != "ties":
            assert torch.equal(keep_BV[sure_B], theirs_BV[sure_B])
            continue
        # They drop some of the equals at the edge of top-p, we none; min-p then counts from the same largest.
        assert not (theirs_BV & ~keep_BV)[sure_B].any()
        least_B1 = torch.where(theirs_BV, z_BV, torch.inf).amin(1, keepdim=True)
        assert torch.equal(keep_BV[sure_B], ((z_BV >= least_B1) & (z_BV > -torch.inf))[sure_B])
    assert num_judged > 1500  # of 2,000


OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.mark.parametrize("name", RULES)
def test_probabilities_are_those_of_transformers(name):
    """The logprob of the token drawn, and the mass of the set, for the tuned form and its twin."""
    rules = RULES[name]
    for num_rows, vocab_size in SHAPES:
        logits_BV, bits_B = make_rows(num_rows, vocab_size, banned=True)
        sure_B = ~at_an_edge(logits_BV, **rules)
        theirs_BV = warped(logits_BV, **rules)
        full_BV = (logits_BV / rules.get("temperature", 1.0)).double().softmax(1)
        mass_B = (full_BV * (theirs_BV > -torch.inf)).sum(1)
        for form in (sample, sample_ref):
            sampled = form(logits_BV, bits_B, **rules)
            rows_B = torch.arange(num_rows)
            assert (theirs_BV[rows_B, sampled.tokens_B] > -torch.inf)[sure_B].all()
            expected_B = theirs_BV.double().log_softmax(1)[rows_B, sampled.tokens_B]
            close = {"atol": 4e-6, "rtol": 1e-5}
            torch.testing.assert_close(sampled.logprobs_B[sure_B].double(), expected_B[sure_B], **close)
            torch.testing.assert_close(sampled.support_mass_B[sure_B].double(), mass_B[sure_B], **close)
            torch.testing.assert_close(
                sampled.full_logprobs_B.double(), full_BV[rows_B, sampled.tokens_B].log(), **close
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("num_stored", [1, 7, 300, 3000])
def test_stored_sets(num_stored, dtype):
    """The most likely of the kept tokens, equals by id; the token comes from them and its logprob is over them."""
    for vocab_size in (5, 700, 3001):
        logits_BV, bits_B = make_rows(8, vocab_size, dtype=dtype)
        for rules in ({}, {"top_p": 0.9}, {"top_k": 12, "temperature": 2.0}, {"temperature": 0.0}):
            sampled = sample(logits_BV, bits_B, num_stored=num_stored, **rules)
            assert sampled.support_BK.shape == (8, num_stored) and sampled.support_BK.dtype == torch.int32
            z_BV = logits_BV.double() / (rules.get("temperature", 1.0) or 1.0)
            rows = z_BV.tolist()
            for b in range(8):
                kept = [v for v in sampled.support_BK[b].tolist() if v >= 0]
                ranked = sorted(range(vocab_size), key=lambda v: (-rows[b][v], v))
                assert kept == ranked[: len(kept)] and sampled.support_BK[b, len(kept) :].eq(-1).all()
                if not rules:
                    assert len(kept) == min(num_stored, vocab_size)
                elif rules.get("temperature") == 0:
                    assert len(kept) == 1
                assert int(sampled.tokens_B[b]) in kept
                logprobs = z_BV[b, kept].log_softmax(0)
                logprob = float(logprobs[kept.index(int(sampled.tokens_B[b]))])
                assert float(sampled.logprobs_B[b]) == pytest.approx(logprob, abs=1e-5)


def test_rules_of_each_row():
    """Rows of one batch with rules of their own are drawn as if each were alone."""
    logits_BV, bits_B = make_rows(60, 1300)
    rules = {
        "temperature": torch.tensor([1.0, 0.0, 0.7, 3.0]).repeat(15),
        "top_k": torch.tensor([0, 5, 0, 0, 40]).repeat(12),
        "top_p": torch.tensor([1.0, 0.9, 0.5]).repeat(20),
        "min_p": torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.0]).repeat(10),
    }
    for num_stored in (0, 50):
        sampled = sample(logits_BV, bits_B, num_stored=num_stored, **rules)
        for b in range(60):
            mine = {key: value[b].item() for key, value in rules.items()}
            alone = sample(logits_BV[b : b + 1], bits_B[b : b + 1], num_stored=num_stored, **mine)
            for field, expected in zip(sampled, alone, strict=True):
                assert (field is None and expected is None) or torch.equal(field[b : b + 1], expected)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_form_and_twin_agree_on_anything(data):
    """Few distinct values: equals everywhere. (Masses are then powers of two apart: no sum is at an edge by chance.)"""
    vocab_size = data.draw(st.integers(1, 1200))
    seed = data.draw(st.integers(0, 10**6))
    distinct = data.draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(seed)
    logits_BV = torch.randint(0, distinct, (4, vocab_size), generator=generator).float() * 1.7 - 3
    bits_B = random_rows(4, seed)
    rules = {
        "top_k": data.draw(st.sampled_from([0, 1, 3, 100, 2000])),
        "top_p": data.draw(st.sampled_from([1.0, 0.37, 0.913])),
        "min_p": data.draw(st.sampled_from([0.0, 0.2, 1.0])),
        "num_stored": data.draw(st.sampled_from([0, 1, 20, 2000])),
        "temperature": data.draw(st.sampled_from([0.0, 1.0, 2.3])),
    }
    fast, twin = sample(logits_BV, bits_B, **rules), sample_ref(logits_BV, bits_B, **rules)
    assert torch.equal(fast.tokens_B, twin.tokens_B)
    for field, expected in zip(fast[1:4], twin[1:4], strict=True):
        torch.testing.assert_close(field, expected, atol=4e-6, rtol=1e-5)
    assert (fast.support_BK is None and twin.support_BK is None) or torch.equal(fast.support_BK, twin.support_BK)
