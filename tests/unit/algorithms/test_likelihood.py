"""The loss of supervised training against closed forms."""

import math

import pytest
import torch

from rlhf_spmd.algorithms.likelihood import likelihood_loss
from tests.unit.algorithms.test_preferences import PAIRS, TOKENS, VOCAB, masks, randn, with_junk


def test_equal_logits_cost_the_logarithm_of_the_vocabulary():
    mask_BG = masks()
    logprobs_BG = torch.zeros(PAIRS, TOKENS, VOCAB).log_softmax(2)[..., 3]
    loss, sums = likelihood_loss(logprobs_BG, torch.ones_like(mask_BG), mask_BG, mask_BG.float())
    assert float(loss / mask_BG.sum()) == pytest.approx(math.log(VOCAB), rel=1e-6)
    total, weight = sums["token_accuracy"]
    assert total == weight == mask_BG.sum() and sums["trained_tokens"][1] == PAIRS


def test_tokens_of_other_turns_neither_count_nor_learn():
    mask_BG, trained_BG = masks(), (randn(PAIRS, TOKENS) > 0).float()
    logprobs_BG = with_junk(-randn(PAIRS, TOKENS, seed=1).abs(), mask_BG).requires_grad_()
    most_likely_BG = torch.ones_like(mask_BG)
    loss, sums = likelihood_loss(logprobs_BG, most_likely_BG, mask_BG, trained_BG, logprobs_BG.detach())
    loss.backward()
    used_BG = mask_BG & (trained_BG > 0)
    assert torch.equal(logprobs_BG.grad, -used_BG.double())
    assert float(sums["loss"][1]) == used_BG.sum() < mask_BG.sum()
    assert float(sums["entropy"][0]) == pytest.approx(-loss.item())
    assert not any(number.requires_grad for pair in sums.values() for number in pair)
