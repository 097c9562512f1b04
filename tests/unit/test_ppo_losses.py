"""The numeric rules of PPO that concern logprobs, losses and the optimizer's schedule: one test or more per row.

The other rows are in test_ppo_math.py; whole training steps are in test_slow_ppo.py.
"""

import math

import pytest
import torch
from torch import Tensor

import rlhf_spmd.algorithms.ppo_math as pm

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
    logprobs_BG = pm.token_logprobs(logits_BGV, tokens_BG)
    loss_sum, _ = pm.policy_loss_sum(
        logprobs_BG, logprobs_BG.detach(), tensor([1.0, -1.0]), torch.ones(1, 2, dtype=torch.bool)
    )
    loss_sum.backward()
    change_BG = pm.token_logprobs(logits_BGV - 0.1 * logits_BGV.grad, tokens_BG) - logprobs_BG
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


# ---- logprobs (rows 12 to 14) ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 5, 17), (2, 7, 129)])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_row_13_temperature(shape, temperature):
    logits_BGV, tokens_BG = randn(*shape), torch.randint(0, shape[2], shape[:2])
    tokens_BG[0, -1] = -1
    logprobs_BG = pm.token_logprobs(logits_BGV, tokens_BG, temperature)
    exact_BGV = (logits_BGV / temperature).log_softmax(-1)
    exact_BG = exact_BGV.gather(2, tokens_BG.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(logprobs_BG, torch.where(tokens_BG >= 0, exact_BG, 0.0))


def test_logprobs_are_at_least_float32():
    logits_BGV, tokens_BG = randn(2, 3, 50).bfloat16(), torch.randint(0, 50, (2, 3))
    logprobs_BG = pm.token_logprobs(logits_BGV, tokens_BG, 0.7)
    assert logprobs_BG.dtype == torch.float32
    torch.testing.assert_close(logprobs_BG, pm.token_logprobs(logits_BGV.float(), tokens_BG, 0.7), rtol=0, atol=0)
    assert pm.token_logprobs(logits_BGV[:0], tokens_BG[:0]).shape == (0, 3)


def test_padding_gets_no_gradient():
    logits_BGV = randn(1, 2, 4).requires_grad_()
    pm.token_logprobs(logits_BGV, torch.tensor([[2, -1]])).sum().backward()
    assert (logits_BGV.grad[0, 0] != 0).all() and (logits_BGV.grad[0, 1] == 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_row_14_kept_sets(temperature):
    """The distribution over the kept set alone; nothing, and no gradient, where there is no token."""
    logits_BGV = randn(2, 3, 9).requires_grad_()
    kept = [[[4, 2, 8], [0, -1, -1], [5, 1, -1]], [[3, 7, -1], [-1, -1, -1], [-1, -1, -1]]]
    tokens_BG = torch.tensor([[2, 0, 5], [7, -1, -1]])
    kept_BGK = torch.tensor(kept, dtype=torch.int32)
    logprobs_BG = pm.kept_logprobs(logits_BGV, tokens_BG, kept_BGK, temperature)
    for b, g in ((0, 0), (0, 1), (0, 2), (1, 0)):
        weights = {v: math.exp(logits_BGV[b, g, v].item() / temperature) for v in kept[b][g] if v >= 0}
        exact = math.log(weights[int(tokens_BG[b, g])] / sum(weights.values()))
        assert logprobs_BG[b, g].item() == pytest.approx(exact, abs=1e-12)
    assert logprobs_BG[1, 1:].tolist() == [0.0, 0.0]
    (gradient_BGV,) = torch.autograd.grad(logprobs_BG.sum(), logits_BGV)
    assert gradient_BGV[0, 0].nonzero()[:, 0].tolist() == [2, 4, 8]
    assert gradient_BGV.isfinite().all() and (gradient_BGV[1, 1:] == 0).all()
    everything_BGK = torch.arange(9).expand(2, 3, 9)
    plain_BG = pm.token_logprobs(logits_BGV, tokens_BG, temperature)
    torch.testing.assert_close(pm.kept_logprobs(logits_BGV, tokens_BG, everything_BGK, temperature), plain_BG)


def test_row_14_what_generation_bans_is_banned_in_every_pass():
    """min_new_tokens bans the EOS at the first positions; without the replay the ratio is off by the kept mass."""
    logits_BGV, tokens_BG = randn(3, 5, 9), torch.randint(0, EOS, (3, 5))
    generated_BGV = pm.ban_tokens(logits_BGV, (EOS, 8), num_positions=2)
    assert torch.isneginf(generated_BGV[:, :2, [EOS, 8]]).all()
    assert int(torch.isneginf(generated_BGV).sum()) == 3 * 2 * 2
    assert pm.ban_tokens(logits_BGV, (EOS,), 0) is logits_BGV
    old_BG, plain_BG = pm.token_logprobs(generated_BGV, tokens_BG), pm.token_logprobs(logits_BGV, tokens_BG)
    kept_BG = 1 - logits_BGV.softmax(-1)[..., [EOS, 8]].sum(-1)
    torch.testing.assert_close((plain_BG - old_BG).exp()[:, :2], kept_BG[:, :2])
    torch.testing.assert_close(plain_BG[:, 2:], old_BG[:, 2:])
    leaf_BGV = logits_BGV.clone().requires_grad_()
    pm.token_logprobs(pm.ban_tokens(leaf_BGV, (EOS, 8), 2), tokens_BG).sum().backward()
    assert leaf_BGV.grad.isfinite().all() and (leaf_BGV.grad[:, :2, [EOS, 8]] == 0).all()


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
