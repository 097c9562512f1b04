"""The numeric rules of PPO that concern losses: one test or more per row.

The other rows are in test_advantages.py, test_masks.py and test_controllers.py; whole training steps in
test_slow_ppo.py.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rlhf_spmd.algorithms import advantages
from rlhf_spmd.algorithms.surrogates import (
    policy_loss,
    policy_loss_prepare,
    policy_loss_sums,
    surrogate_loss,
    value_loss,
)
from rlhf_spmd.runtime.execute.optimizer_step import OptimizerStep
from tests.folders import write_all
from tests.runs import RunOf, load

EOS = 7
NAN = float("nan")


def tensor(*rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def randn(*shape, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_mask(num_rows: int, num_tokens: int, seed: int = 0) -> Tensor:
    """Returns any mask, holes and empty rows included."""
    return torch.rand(num_rows, num_tokens, generator=torch.Generator().manual_seed(seed)) < 0.6


def with_one_more(x_BG: Tensor) -> Tensor:
    """Adds a column of values after the last token, which no loss reads."""
    return torch.cat([x_BG, x_BG.new_full((len(x_BG), 1), NAN)], 1)


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
    loss_sum, sums = policy_loss(new_BG, tensor([-1.0]), tensor([advantage]), torch.tensor([[True]]))
    loss_sum.backward()
    assert loss_sum.item() == pytest.approx(loss)
    assert float(new_BG.grad) == pytest.approx(slope)
    assert float(sums["clip_fraction"][0]) == clipped
    assert not any(number.requires_grad for pair in sums.values() for number in pair)


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
    columns = with_one_more(value_BG), with_one_more(tensor([old])), tensor([target]), torch.tensor([[True]])
    loss_sum, sums = value_loss(*columns)
    loss_sum.backward()
    assert loss_sum.item() == pytest.approx(loss)
    assert float(value_BG.grad) == pytest.approx(slope)
    assert float(sums["value_error_sq"][0]) == pytest.approx((value - target) ** 2)
    doubled, _ = value_loss(*columns, value_coef=1.0, clip_value=0.2)
    assert doubled.item() == pytest.approx(2 * loss)


def test_row_11_sums_over_the_mask_only():
    """Masked entries may hold anything, add nothing and get no gradient; shares of any shape add up to the whole."""
    mask_BG = random_mask(6, 5, seed=4)
    new_BG, old_BG, target_BG = (torch.where(mask_BG, randn(6, 5, seed=s) * 0.3, NAN) for s in range(3))
    new_BG.requires_grad_()

    def loss_of_values(new_BG, old_BG, target_BG, mask_BG):
        return value_loss(with_one_more(new_BG), with_one_more(old_BG), target_BG, mask_BG)

    for loss in (policy_loss, loss_of_values):
        whole, sums = loss(new_BG, old_BG, target_BG, mask_BG)
        (gradient_BG,) = torch.autograd.grad(whole, new_BG)
        assert whole.isfinite() and (gradient_BG[~mask_BG] == 0).all() and gradient_BG.isfinite().all()
        assert all(float(weight) == int(mask_BG.sum()) for _, weight in sums.values())
        shares = slice(0, 1), slice(1, 1), slice(1, 6)
        parts = [loss(new_BG[own], old_BG[own], target_BG[own], mask_BG[own]) for own in shares]
        torch.testing.assert_close(sum(part for part, _ in parts), whole)
        for name in sums:
            for place in (0, 1):  # the sum, and over how many
                torch.testing.assert_close(sum(part[name][place] for _, part in parts), sums[name][place])


def test_entropy_bonus():
    """A step down the loss makes the distribution flatter; masked entries add nothing and get no gradient."""
    logits_BGV = randn(1, 3, 5).requires_grad_()
    logprobs_BGV = logits_BGV.log_softmax(-1)
    entropy_BG = -(logprobs_BGV.exp() * logprobs_BGV).sum(-1)
    mask_BG = torch.tensor([[True, False, True]])
    entropy_BG = torch.where(mask_BG, entropy_BG, NAN)
    columns = tensor([-1.0, -2.0, -3.0]), tensor([-1.5, -2.0, -2.5]), tensor([1.0, NAN, -2.0]), mask_BG
    plain, without = policy_loss(*columns)
    loss, sums = policy_loss(*columns, entropy_BG, entropy_coef=0.3)
    entropy, num_tokens = sums.pop("entropy")
    assert sums == without  # the bonus is logged as entropy alone
    assert (entropy.item(), num_tokens.item()) == (pytest.approx(entropy_BG[mask_BG].sum().item()), 2)
    assert (plain - loss).item() == pytest.approx(0.3 * entropy.item()) and not entropy.requires_grad
    (slope_BGV,) = torch.autograd.grad(loss, logits_BGV)
    assert not slope_BGV[0, 1].any()
    after_BGV = (logits_BGV - slope_BGV).softmax(-1)
    after_BG = -(after_BGV * after_BGV.log()).sum(-1)
    assert (after_BG > entropy_BG)[mask_BG].all()


@pytest.mark.parametrize("sampling", [[], ["generation.top_k=9", "generation.min_new_tokens=3"]], ids=["all", "kept"])
def test_entropy_in_a_run(sampling, tmp_path):
    """Logged with the option alone; a tiny bonus changes no loss, a large one keeps the entropy up."""
    overrides = write_all(tmp_path, eos_token_ids=(1, 2, 3))
    metrics = {
        coef: RunOf(load(overrides, f"iterations={num}", f"ppo.entropy_coef={coef}", *sampling)).iterations()
        for coef, num in ((0, 1), (1e-9, 4), (2, 4))
    }
    assert "entropy" not in metrics[0][0]
    assert 0 < metrics[1e-9][-1]["entropy"] < metrics[2][-1]["entropy"] <= math.log(9 if sampling else 1e4)
    assert metrics[0][0]["policy_loss"] == pytest.approx(metrics[1e-9][0]["policy_loss"], abs=1e-6)


# ---- whitening before the loss (row 8) ------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_row_08_advantages_are_whitened_by_the_sums_of_the_mini_batch(num_ranks):
    """Each rank prepares its rows from what was added over all of them; the whole batch was whitened already."""
    mask_BG = random_mask(6, 4)
    advantages_BG = torch.where(mask_BG, randn(6, 4) * 2 + 3, NAN)
    shares = list(zip(advantages_BG.chunk(num_ranks), mask_BG.chunk(num_ranks), strict=True))
    sums = sum(policy_loss_sums(*share) for share in shares)
    assert sums.dtype == torch.float64 and sums.shape == (2,)
    expected_BG = advantages.whitened(advantages_BG, mask_BG, advantages.moments(advantages_BG, mask_BG))
    divisor = mask_BG.sum().double()
    parts = [policy_loss_prepare(*share, sums, divisor, whiten="mini_batch") for share in shares]
    assert all(list(part) == ["advantages"] for part in parts)
    torch.testing.assert_close(torch.cat([part["advantages"] for part in parts]), expected_BG)
    assert policy_loss_prepare(advantages_BG, mask_BG, sums, divisor, whiten="batch") == {}


# ---- the change of the policy (rows 18, 19) -------------------------------------------------------------------------


def test_row_18_approx_kl_sign_and_value():
    """E_old[exp(d) - 1 - d] = KL(old || new) with d = new - old; with old - new it would be another number."""
    old_logits, new_logits = randn(5, seed=1), randn(5, seed=2)
    old_V, new_V = old_logits.log_softmax(0), new_logits.log_softmax(0)
    kl = float((old_V.exp() * (old_V - new_V)).sum())
    tokens = torch.multinomial(old_V.exp(), 200_000, replacement=True, generator=torch.Generator().manual_seed(3))
    mask = torch.ones(1, len(tokens), dtype=torch.bool)
    _, sums = policy_loss(new_V[tokens][None], old_V[tokens][None], torch.ones(1, len(tokens)).double(), mask)
    mean = {name: float(value / weight) for name, (value, weight) in sums.items()}
    assert mean["approx_kl"] == pytest.approx(kl, rel=0.03)
    assert mean["ratio"] == pytest.approx(1.0, abs=0.02)
    # Both forms, by hand, on one token that became twice as likely: d = log 2.
    _, sums = policy_loss(tensor([-1.0]), tensor([-1.0 - math.log(2)]), tensor([1.0]), mask[:, :1])
    assert float(sums["approx_kl"][0]) == pytest.approx(2 - 1 - math.log(2))
    assert float(sums["approx_kl_sq"][0]) == pytest.approx(math.log(2) ** 2 / 2)
    assert float(sums["ratio"][0]) == pytest.approx(2.0)


@pytest.mark.parametrize("loss", [policy_loss, surrogate_loss])
@pytest.mark.parametrize("log_ratio", [30.0, 100.0, 1000.0, -30.0, -1000.0])
def test_extreme_ratios(loss, log_ratio):
    """No NaN and no infinity: a clipped token has no gradient, and any other one keeps its sign."""
    mask_BG = torch.ones(1, 2, dtype=torch.bool)
    for advantage in (1.0, 0.0, -1.0):
        new_BG = torch.tensor([[0.0, -1.0]], requires_grad=True)
        advantages_BG = torch.tensor([[advantage, 1.0]])
        total, sums = loss(new_BG, torch.tensor([[-log_ratio, -1.0]]), advantages_BG, mask_BG)
        (slope_BG,) = torch.autograd.grad(total, new_BG)
        is_clipped = advantage * log_ratio > 0
        assert slope_BG[0, 1] == -1 and slope_BG.isfinite().all()
        assert float(slope_BG[0, 0].sign()) == (0.0 if is_clipped else -advantage)
        assert all(math.isfinite(value) for value, _ in sums.values())


def stops(*local: tuple[float, int], limit: float | None) -> list[bool]:
    """Returns what each rank decides after a step in which it counted a sum of approx_kl over so many tokens."""
    total = torch.tensor(local, dtype=torch.float64).sum(0)
    job = SimpleNamespace(
        world=SimpleNamespace(device=torch.device("cpu")), reduced=lambda own, run: own + (total - own)
    )
    found = []
    for of_rank, tokens in local:
        halves = [{"approx_kl": (torch.tensor(of_rank / 2).double(), torch.tensor(tokens / 2))}] * 2  # micro-batches
        call = SimpleNamespace(stop=("approx_kl", limit) if limit else None, function="policy_loss")
        step = SimpleNamespace(job=job, call=call, run=None, stats=halves, reports=True)
        found.append(OptimizerStep.should_stop(step))
    return found


def test_row_19_early_stop_is_decided_on_global_sums():
    """Two ranks that would disagree by themselves."""
    local = [(0.5, 10), (0.1, 30)]  # sums of approx_kl and tokens: means 0.05 and 0.0033
    alone = [stops(rank, limit=0.02) for rank in local]
    assert alone == [[True], [False]]
    assert stops(*local, limit=0.02) == [False, False]
    assert stops(*local, limit=0.01) == [True, True]
    assert stops((99.0, 1), limit=None) == [False]
    assert stops((0.0, 0), limit=0.1) == [False]
    assert stops((NAN, 40), limit=0.1) == [True]
