"""The numeric rules of PPO that concern losses: one test or more per row.

The other rows are in test_advantages.py, test_masks.py and test_controllers.py; whole training steps in
test_slow_ppo.py.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rlhf_spmd.algorithms.surrogates import (
    policy_loss,
    surrogate_loss,
    value_loss,
)
from rlhf_spmd.runtime.execute.optimizer_step import OptimizerStep
from tests.folders import write_all
from tests.runs import RunOf, load
from tests.unit.algorithms.test_advantages import randn, random_mask, tensor

EOS = 7
NAN = float("nan")


def with_one_more(x_BG: Tensor) -> Tensor:
    """Adds a column of values after the last token, which no loss reads."""
    return torch.cat([x_BG, x_BG.new_full((len(x_BG), 1), NAN)], 1)


# ---- losses (rows 9, 10, 11) ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "sampling",
    [pytest.param([], marks=pytest.mark.slow), ["generation.top_k=9", "generation.min_new_tokens=3"]],
    ids=["all", "kept"],
)
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


# ---- the change of the policy (rows 18, 19) -------------------------------------------------------------------------


def test_row_18_approx_kl_by_hand():
    """Both forms, and the ratio, of a token that became twice as likely: d = log 2."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    _, sums = policy_loss(tensor([-1.0]), tensor([-1.0 - math.log(2)]), tensor([1.0]), mask)
    found = [float(sums[name][0]) for name in ("approx_kl", "approx_kl_sq", "ratio")]
    assert found == pytest.approx([2 - 1 - math.log(2), math.log(2) ** 2 / 2, 2.0])


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
