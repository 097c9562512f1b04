"""The KL term of the loss, against the derivative of the KL divergence of a distribution."""

import torch

from rlhf_spmd.algorithms.surrogates import surrogate_loss

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
