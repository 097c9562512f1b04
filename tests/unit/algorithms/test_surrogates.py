"""The KL term of the loss against the derivative of the KL divergence, and the policy loss of distillation."""

import pytest
import torch

from rlhf_spmd.algorithms.group_advantages import distillation_advantages, group_advantages
from rlhf_spmd.algorithms.surrogates import kl_estimate, surrogate_loss
from tests.unit.algorithms.test_preferences import TOKENS, masks, randn, with_junk

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def test_an_unbiased_kl_term_has_the_gradient_of_the_kl():
    """The expectation over all tokens of a distribution, with ratio 1."""
    own = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.5, -0.5, 0.2], dtype=torch.float64).log_softmax(0)
    logprobs = own.log_softmax(0)
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    mask, slopes = torch.ones(4, 1, dtype=torch.bool), {}
    for unbiased in (True, False):
        terms = [
            surrogate_loss(
                logprobs[token].view(1, 1),
                logprobs[token].detach().view(1, 1),
                torch.zeros(1, dtype=torch.float64),
                mask[:1],
                ref_logprobs_BG=reference[token].view(1, 1),
                kl_coef=1.0,
                kl_unbiased=unbiased,
            )[0]
            for token in range(4)
        ]
        expected = sum(p * term for p, term in zip(logprobs.detach().exp(), terms, strict=True))
        torch.testing.assert_close(expected, kl, **CLOSE)
        (slopes[unbiased],) = torch.autograd.grad(expected, own, retain_graph=True)
    (wanted,) = torch.autograd.grad(kl, own)
    torch.testing.assert_close(slopes[True], wanted, **CLOSE)
    assert not torch.allclose(slopes[False], wanted, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_beyond_the_guard(dtype):
    """Value and gradient are held at d = -20, and nothing is held where d is positive; inside the bits are those of
    the bare formula."""
    d = torch.tensor([-1e4, -100.0, -30.0, -20.1, -20.0, -19.9, 19.9, 30.0, 1e4], dtype=dtype, requires_grad=True)
    value = kl_estimate(d, "k3")
    (gradient,) = torch.autograd.grad(value.sum(), d)
    exact = 1 - torch.exp(-d.detach().double())
    assert value.isfinite().all() and torch.equal(gradient.sign(), exact.sign().to(dtype))
    assert (value[:4] == value[4]).all() and (gradient[:4] == gradient[4]).all()
    torch.testing.assert_close(gradient[4:].double(), exact[4:])
    d = (8 * torch.randn(500, dtype=dtype, generator=torch.Generator().manual_seed(1))).clamp(-20, 20).requires_grad_()
    bare = torch.expm1(-d) + d
    assert torch.equal(kl_estimate(d, "k3"), bare)
    found = (torch.autograd.grad(x.sum(), d)[0] for x in (kl_estimate(d, "k3"), bare))
    assert torch.equal(*found)


def test_the_gradient_is_that_of_the_reverse_kl_divergence():
    """The expectation over the actor's tokens of its advantage times the gradient of the logprob."""
    logits_V, teacher_V = randn(7).requires_grad_(), randn(7, seed=1).log_softmax(0)
    exact = (logits_V.softmax(0) * (logits_V.log_softmax(0) - teacher_V)).sum()
    (expected_V,) = torch.autograd.grad(exact, logits_V)
    logprobs_B1 = logits_V.log_softmax(0)[:, None]
    old_B1, mask_B1 = logprobs_B1.detach(), torch.ones(7, 1, dtype=torch.bool)
    advantages_B1, _ = distillation_advantages(old_B1, teacher_V[:, None], mask_B1)
    # each token once, weighted by its probability
    loss = sum(
        old_B1[v, 0].exp() * surrogate_loss(logprobs_B1[v : v + 1], old_B1[v : v + 1], advantages_B1[v : v + 1], one)[0]
        for v, one in enumerate(mask_B1.split(1))
    )
    (found_V,) = torch.autograd.grad(loss, logits_V)
    torch.testing.assert_close(found_V, expected_V, rtol=1e-10, atol=1e-12)


def test_a_task_adds_the_advantage_of_its_group():
    mask_NSG = masks(num_rows=6).view(2, 3, TOKENS)
    logprobs_NSG, teacher_NSG = (with_junk(-randn(2, 3, TOKENS, seed=seed).abs(), mask_NSG) for seed in (1, 2))
    scores_NS = torch.tensor([[1.0, 0.0, 0.0], [2.0, 2.0, 2.0]], dtype=torch.float64)
    alone_NSG, _ = distillation_advantages(logprobs_NSG, teacher_NSG, mask_NSG, kl_coef=0.5)
    found_NSG, sums = distillation_advantages(
        logprobs_NSG, teacher_NSG, mask_NSG, scores_NS, kl_coef=0.5, task_coef=2.0
    )
    task_NS, *_ = group_advantages(scores_NS, mask_NSG, torch.ones(2, 3, dtype=torch.bool))
    expected_NSG = torch.where(mask_NSG, alone_NSG + 2.0 * task_NS[..., None], 0.0)
    torch.testing.assert_close(found_NSG, expected_NSG)
    assert not task_NS[1].any() and sums["reward"][0].shape == (2, 3)
