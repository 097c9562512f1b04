"""The losses of pairs of responses against closed forms."""

import math

import pytest
import torch
from torch import Tensor

from rlhf_spmd.algorithms.preferences import bradley_terry_loss, direct_preference_loss
from tests.unit.algorithms.test_advantages import randn

NAN = math.nan
PAIRS, TOKENS = 5, 6


def masks(seed: int = 0, num_rows: int = PAIRS) -> Tensor:
    lengths = torch.randint(1, TOKENS + 1, (num_rows,), generator=torch.Generator().manual_seed(seed))
    return torch.arange(TOKENS) < lengths[:, None]


def with_junk(x_BG: Tensor, mask_BG: Tensor) -> Tensor:
    return x_BG.where(mask_BG, torch.tensor(NAN, dtype=x_BG.dtype))


# ---- reward models --------------------------------------------------------------------------------------------------


def test_scores_in_the_log_are_those_of_real_pairs():
    mask_BG = torch.tensor([[True, True], [False, False]])
    chosen, rejected = torch.tensor([2.0, 50.0]), torch.tensor([-1.0, -50.0])
    loss, sums = bradley_terry_loss(chosen, rejected, mask_BG, torch.zeros(2))
    assert float(loss) == pytest.approx(math.log1p(math.exp(-3.0)), rel=1e-6)
    assert [float(sums[name][0]) for name in ("score_min", "score_max", "score_mean")] == [-1.0, 2.0, 1.0]
    assert {float(sums[name][1]) for name in ("loss", "score_min", "score_max")} == {1.0}
    _, blank = bradley_terry_loss(chosen[1:], rejected[1:], mask_BG[1:], torch.zeros(1))
    assert all(float(weight) == 0 for _, weight in blank.values())


# ---- preferences ----------------------------------------------------------------------------------------------------


def preferred(actor: list[Tensor], reference: list[Tensor], mask: list[Tensor], **options) -> tuple[Tensor, dict]:
    return direct_preference_loss(*actor, *mask, *reference, **options)


def pair_of(seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Returns logprobs and masks of both responses."""
    mask = [masks(seed), masks(seed + 1)]
    return [with_junk(-randn(PAIRS, TOKENS, seed=seed + k).abs(), mask[k]) for k in (0, 1)], mask


def test_blank_pairs_count_nothing():
    logprobs, mask = pair_of()
    mask = [torch.zeros_like(one) for one in mask]
    loss, sums = preferred([one.clone().requires_grad_() for one in logprobs], logprobs, mask, loss="ipo")
    assert float(loss) == 0 and all(float(total) == float(weight) == 0 for total, weight in sums.values())
