"""The losses of pairs of responses against closed forms."""

import math

import pytest
import torch
from torch import Tensor

from rlhf_spmd.algorithms.preferences import bradley_terry_loss, direct_preference_loss, foresight

LN2, NAN = math.log(2), math.nan
VOCAB, PAIRS, TOKENS = 37, 5, 6


def randn(*shape, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def masks(seed: int = 0, num_rows: int = PAIRS) -> Tensor:
    lengths = torch.randint(1, TOKENS + 1, (num_rows,), generator=torch.Generator().manual_seed(seed))
    return torch.arange(TOKENS) < lengths[:, None]


def with_junk(x_BG: Tensor, mask_BG: Tensor) -> Tensor:
    return x_BG.where(mask_BG, torch.tensor(NAN, dtype=x_BG.dtype))


# ---- reward models --------------------------------------------------------------------------------------------------


def scored(chosen: Tensor, rejected: Tensor, margin: float = 0.0, **options) -> tuple[Tensor, dict]:
    mask_BG = torch.ones(len(chosen), 2, dtype=torch.bool)
    return bradley_terry_loss(chosen, rejected, mask_BG, torch.full_like(chosen, margin), **options)


def test_a_head_of_zeros_has_the_loss_ln_2_and_half_of_the_pairs_right():
    zeros = torch.zeros(PAIRS, dtype=torch.float64)
    loss, sums = scored(zeros, zeros)
    assert float(loss) == pytest.approx(PAIRS * LN2)
    assert float(sums["accuracy"][0]) == PAIRS / 2 and float(sums["margin"][0]) == 0


def test_a_constant_changes_only_the_centering_term():
    chosen, rejected = randn(PAIRS), randn(PAIRS, seed=1)
    assert float(scored(chosen + 3, rejected + 3)[0]) == pytest.approx(float(scored(chosen, rejected)[0]), rel=1e-12)
    before, after = (float(scored(chosen + c, rejected + c, centering_coef=0.1)[0]) for c in (0.0, 3.0))
    both = chosen + rejected
    assert after - before == pytest.approx(0.1 * float(((both + 6) ** 2 - both**2).sum()), rel=1e-10)


def test_scores_in_the_log_are_those_of_real_pairs():
    mask_BG = torch.tensor([[True, True], [False, False]])
    chosen, rejected = torch.tensor([2.0, 50.0]), torch.tensor([-1.0, -50.0])
    loss, sums = bradley_terry_loss(chosen, rejected, mask_BG, torch.zeros(2))
    assert float(loss) == pytest.approx(math.log1p(math.exp(-3.0)), rel=1e-6)
    assert [float(sums[name][0]) for name in ("score_min", "score_max", "score_mean")] == [-1.0, 2.0, 1.0]
    assert {float(sums[name][1]) for name in ("loss", "score_min", "score_max")} == {1.0}
    _, blank = bradley_terry_loss(chosen[1:], rejected[1:], mask_BG[1:], torch.zeros(1))
    assert all(float(weight) == 0 for _, weight in blank.values())


def test_foresight_counts_every_token_before_the_last_output_and_moves_no_score():
    mask_BG = torch.tensor([[True, True, False], [True, True, True]])
    scores = torch.tensor([2.0, -1.0], requires_grad=True)
    values_BG1 = torch.tensor([[2.0, 0.0, 2.0, NAN], [0.0, 0.0, 0.0, -1.0]], requires_grad=True)
    found_B = foresight(values_BG1, scores, mask_BG)
    assert found_B.tolist() == [2.0, 1.0]
    found_B.sum().backward()
    assert scores.grad is None and torch.equal(
        values_BG1.grad != 0, torch.tensor([[False, True, False, False], [True, True, True, False]])
    )
    pair = (scores.detach(), torch.zeros(2), mask_BG, torch.zeros(2), mask_BG, values_BG1, torch.zeros(2, 4))
    plain, more = (bradley_terry_loss(*pair, foresight_coef=coef) for coef in (0.0, 0.5))
    assert float((more[0] - plain[0]).detach()) == pytest.approx(0.5 * 3.0)
    assert more[1]["accuracy"] == plain[1]["accuracy"]


# ---- preferences ----------------------------------------------------------------------------------------------------


def preferred(actor: list[Tensor], reference: list[Tensor], mask: list[Tensor], **options) -> tuple[Tensor, dict]:
    return direct_preference_loss(*actor, *mask, *reference, **options)


def pair_of(seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Returns logprobs and masks of both responses."""
    mask = [masks(seed), masks(seed + 1)]
    return [with_junk(-randn(PAIRS, TOKENS, seed=seed + k).abs(), mask[k]) for k in (0, 1)], mask


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_before_training_the_loss_is_ln_2(per_token, label_smoothing):
    logprobs, mask = pair_of()
    loss, sums = preferred(logprobs, logprobs, mask, per_token=per_token, label_smoothing=label_smoothing)
    assert float(loss) == pytest.approx(PAIRS * LN2)
    assert float(sums["accuracy"][0]) == PAIRS / 2, "no response is better than the other"
    for name in ("margin", "chosen_reward", "rejected_reward"):
        assert float(sums[name][0]) == 0, name


def test_blank_pairs_count_nothing():
    logprobs, mask = pair_of()
    mask = [torch.zeros_like(one) for one in mask]
    loss, sums = preferred([one.clone().requires_grad_() for one in logprobs], logprobs, mask, loss="ipo")
    assert float(loss) == 0 and all(float(total) == float(weight) == 0 for total, weight in sums.values())
