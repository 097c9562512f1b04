"""The numeric rules of PPO that concern logprobs, losses and the optimizer's schedule: one test or more per row.

The other rows are in test_ppo_math.py; whole training steps are in test_slow_ppo.py.
"""

import math

import pytest
import torch
from torch import Tensor

import rlhf_spmd.algorithms.ppo_math as pm
from tests.folders import write_all
from tests.runs import RunOf, load

EOS = 7
NAN = float("nan")


def tensor(*rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def randn(*shape, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_mask(num_rows: int, num_tokens: int, seed: int = 0) -> Tensor:
    """Any mask, holes and empty rows included."""
    return torch.rand(num_rows, num_tokens, generator=torch.Generator().manual_seed(seed)) < 0.6


# ---- losses (rows 9, 10, 11) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.5, 2.0, -2.4, 0.0, 1),  # good action, already likely enough: no more push
        (0.5, 2.0, -1.0, -1.0, 0),
        (0.5, -2.0, 1.6, 0.0, 1),  # bad action, already rare enough
        (1.5, -2.0, 3.0, 3.0, 0),
    ],
)
def test_row_09_policy_loss(ratio, advantage, loss, slope, clipped):
    """Values and slopes in the new logprob, d loss / d logprob = -A ratio or 0."""
    new_BG = tensor([math.log(ratio) - 1.0]).requires_grad_()
    loss_sum, sums = pm.policy_loss_sum(new_BG, tensor([-1.0]), tensor([advantage]), torch.tensor([[True]]))
    loss_sum.backward()
    assert loss_sum.item() == pytest.approx(loss)
    assert float(new_BG.grad) == pytest.approx(slope)
    assert float(sums["clip_fraction"]) == clipped
    assert not any(value.requires_grad for value in sums.values())


def test_row_09_sign():
    """A step down the loss makes tokens with a positive advantage more likely."""
    logits_BGV = torch.zeros(1, 2, 5, dtype=torch.float64, requires_grad=True)
    tokens_BG = torch.tensor([[1, 3]])

    def logprobs_of(logits_BGV: Tensor) -> Tensor:
        return logits_BGV.log_softmax(2).gather(2, tokens_BG[..., None])[..., 0]

    logprobs_BG = logprobs_of(logits_BGV)
    loss_sum, _ = pm.policy_loss_sum(
        logprobs_BG, logprobs_BG.detach(), tensor([1.0, -1.0]), torch.ones(1, 2, dtype=torch.bool)
    )
    loss_sum.backward()
    change_BG = logprobs_of(logits_BGV - 0.1 * logits_BGV.grad) - logprobs_BG
    assert change_BG[0, 0] > 0 > change_BG[0, 1]


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        (1.0, 1.0, 3.0, 2.0, -2.0),
        (2.0, 1.0, 3.0, 0.5 * 1.8**2, 0.0),  # moved the right way, beyond the clip: no more push
        (0.5, 1.0, 3.0, 0.5 * 2.5**2, -2.5),  # moved the wrong way: full pull back
        (2.0, 1.0, 1.1, 0.5 * 0.9**2, 0.9),
    ],
)
def test_row_10_value_loss(value, old, target, loss, slope):
    value_BG = tensor([value]).requires_grad_()
    loss_sum, sums = pm.value_loss_sum(value_BG, tensor([old]), tensor([target]), torch.tensor([[True]]))
    loss_sum.backward()
    assert loss_sum.item() == pytest.approx(loss)
    assert float(value_BG.grad) == pytest.approx(slope)
    assert float(sums["value_error_sq"]) == pytest.approx((value - target) ** 2)
    doubled, _ = pm.value_loss_sum(
        value_BG, tensor([old]), tensor([target]), torch.tensor([[True]]), value_coef=1.0, clip_value=0.2
    )
    assert doubled.item() == pytest.approx(2 * loss)


def test_row_11_sums_over_the_mask_only():
    """Masked entries may hold anything, add nothing and get no gradient; shares of any shape add up to the whole."""
    mask_BG = random_mask(6, 5, seed=4)
    new_BG, old_BG, target_BG = (torch.where(mask_BG, randn(6, 5, seed=s) * 0.3, NAN) for s in range(3))
    new_BG.requires_grad_()
    for loss in (pm.policy_loss_sum, pm.value_loss_sum):
        whole, sums = loss(new_BG, old_BG, target_BG, mask_BG)
        (gradient_BG,) = torch.autograd.grad(whole, new_BG)
        assert whole.isfinite() and (gradient_BG[~mask_BG] == 0).all() and gradient_BG.isfinite().all()
        assert float(sums["num_tokens"]) == int(mask_BG.sum())
        shares = slice(0, 1), slice(1, 1), slice(1, 6)
        parts = [loss(new_BG[own], old_BG[own], target_BG[own], mask_BG[own]) for own in shares]
        torch.testing.assert_close(sum(part for part, _ in parts), whole)
        for name in sums:
            torch.testing.assert_close(sum(part[name] for _, part in parts), sums[name])


def test_entropy_bonus():
    """A step down the loss makes the distribution flatter; masked entries add nothing and get no gradient."""
    logits_BGV = randn(1, 3, 5).requires_grad_()
    logprobs_BGV = logits_BGV.log_softmax(-1)
    entropy_BG = -(logprobs_BGV.exp() * logprobs_BGV).sum(-1)
    mask_BG = torch.tensor([[True, False, True]])
    entropy_BG = torch.where(mask_BG, entropy_BG, NAN)
    bonus, sums = pm.entropy_bonus_sum(entropy_BG, mask_BG, coef=0.3)
    assert float(sums["entropy"]) == pytest.approx(entropy_BG[mask_BG].sum().item())
    assert bonus.item() == pytest.approx(0.3 * sums["entropy"].item()) and not sums["entropy"].requires_grad
    (slope_BGV,) = torch.autograd.grad(-bonus, logits_BGV)
    assert not slope_BGV[0, 1].any()
    after_BGV = (logits_BGV - slope_BGV).softmax(-1)
    after_BG = -(after_BGV * after_BGV.log()).sum(-1)
    assert (after_BG > entropy_BG)[mask_BG].all()


@pytest.mark.parametrize("sampling", [[], ["generation.top_k=9", "generation.min_new_tokens=3"]], ids=["all", "kept"])
def test_entropy_in_a_run(sampling, tmp_path):
    """Logged with the option alone; a tiny bonus changes no loss, a large one keeps the entropy up."""
    overrides = write_all(tmp_path, eos_token_ids=(1, 2, 3))
    runs = {
        coef: RunOf(load(overrides, "iterations=4", f"ppo.entropy_coef={coef}", *sampling)) for coef in (0, 1e-9, 2)
    }
    metrics = {coef: run.iterations() for coef, run in runs.items()}
    assert "entropy" not in metrics[0][0]
    assert 0 < metrics[1e-9][-1]["entropy"] < metrics[2][-1]["entropy"] <= math.log(9 if sampling else 1e4)
    assert metrics[0][0]["policy_loss"] == pytest.approx(metrics[1e-9][0]["policy_loss"], abs=1e-6)


# ---- logprobs (row 12; rows 13 and 14 are in test_token_logprobs.py and test_batch.py) -------------------------------


def test_row_12_parity():
    """The guard of generator logprobs: how far, on average and at worst, and where."""
    generated_BG = tensor([-1.0, -2.0, 0.0], [-3.0, -4.0, -5.0])
    forced_BG = tensor([-1.0, -2.5, 9.0], [-3.0, -4.0, -5.25])
    mask_BG = torch.tensor([[True, True, False], [True, True, True]])
    assert pm.parity(generated_BG, forced_BG, mask_BG) == pm.Parity(5, 0.75, 0.5, row=0, position=1)
    assert pm.parity(generated_BG, forced_BG, mask_BG).mean_abs == 0.15
    forced_BG[1, 1] = NAN
    worst = pm.parity(generated_BG, forced_BG, mask_BG)
    assert (worst.max_abs, worst.row, worst.position) == (math.inf, 1, 1)
    for mask in (torch.zeros_like(mask_BG), mask_BG[:0]):
        empty = pm.parity(generated_BG[: len(mask)], forced_BG[: len(mask)], mask)
        assert (empty.num_tokens, empty.mean_abs, empty.max_abs, empty.row) == (0, 0.0, 0.0, -1)


# ---- learning rate (row 20) and the file itself ---------------------------------------------------------------------


def test_row_20_learning_rate():
    def rates(**options):
        return [pm.learning_rate(step, peak=1.0, **options) for step in range(10)]

    assert rates() == [1.0] * 10
    assert rates(num_warmup_steps=4) == [0.25, 0.5, 0.75] + [1.0] * 7
    linear = rates(num_warmup_steps=2, num_steps=6, decay="linear")
    assert linear == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0])
    cosine = rates(num_warmup_steps=2, num_steps=6, decay="cosine")
    assert cosine[:3] == [0.5, 1.0, 1.0] and cosine[4] == pytest.approx(0.5) and cosine[6:] == pytest.approx([0.0] * 4)
    assert cosine == sorted(cosine[:2]) + sorted(cosine[2:], reverse=True)
