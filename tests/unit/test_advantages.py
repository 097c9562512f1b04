"""The numeric rules of PPO, one test or more per row (the row numbers are those of the project's rule table).

Here: scores, rewards, KL, advantages, whitening. Logprobs and losses are in test_ppo_losses.py, whole training steps in
test_slow_ppo.py, the order of rollouts in test_order.py, random numbers in test_philox.py.
"""

import ast
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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


# ---- tokens, masks, scores (rows 3, 4, 5, 17) -----------------------------------------------------------------------


def test_mask_and_end():
    responses_BG = torch.tensor([[3, 4, EOS, -1], [3, 4, 5, 6], [EOS, -1, -1, -1], [-1, -1, -1, -1], [1, 2, 3, 8]])
    mask_BG = pm.response_mask(responses_BG)
    assert mask_BG.sum(1).tolist() == [3, 4, 1, 0, 4]
    assert pm.last_index(mask_BG).tolist() == [2, 3, 0, -1, 3]
    assert pm.ended(responses_BG, (EOS, 8)).tolist() == [True, False, True, False, True]
    assert pm.ended(responses_BG, ()).tolist() == [False] * 5
    assert pm.ended(responses_BG[:0], (EOS,)).shape == (0,)


@pytest.mark.parametrize("eos", [0, EOS])
def test_row_03_score_on_the_last_real_token(eos):
    """...which is the EOS if there is one, whatever id EOS or the tokenizer's pad has: padding is -1."""
    responses_BG = torch.tensor([[3, eos, -1], [eos, -1, -1], [4, 4, 4], [-1, -1, -1]])
    mask_BG = pm.response_mask(responses_BG)
    rewards_BG = pm.token_rewards(tensor(1.0, 2.0, 3.0, 4.0), torch.zeros(4, 3).double(), mask_BG, kl_coef=0.1)
    assert rewards_BG.tolist() == [[0, 1, 0], [2, 0, 0], [0, 0, 3], [0, 0, 0]]


def test_row_03_score_on_the_last_token_of_a_mask_with_holes():
    mask_BG = torch.tensor([[True, False, True, False]])
    assert pm.token_rewards(tensor(5.0), torch.zeros(1, 4), mask_BG, 0.1).tolist() == [[0, 0, 5, 0]]


def test_row_04_truncated_responses():
    scores_B, ended_B = tensor(0.5, 9.0), torch.tensor([True, False])
    assert pm.shaped_scores(scores_B, ended_B).tolist() == [0.5, -1.0]
    assert pm.shaped_scores(scores_B, ended_B, truncation_penalty=-3.0).tolist() == [0.5, -3.0]
    assert pm.shaped_scores(scores_B, ended_B, truncation="bootstrap").tolist() == [0.5, 0.0]
    with pytest.raises(AssertionError):
        pm.shaped_scores(scores_B, ended_B, truncation="none")


def test_row_05_clip_and_normalise():
    """Both optional; normalise first, then clip; the truncation penalty is left alone."""
    scores_B, ended_B = tensor(5.0, -9.0, 2.0, 100.0), torch.tensor([True, True, True, False])
    assert pm.shaped_scores(scores_B, ended_B).tolist() == [5.0, -9.0, 2.0, -1.0]
    assert pm.shaped_scores(scores_B, ended_B, clip_score=4.0).tolist() == [4.0, -4.0, 2.0, -1.0]
    shaped_B = pm.shaped_scores(scores_B, ended_B, mean=1.0, std=4.0, clip_score=2.0)
    assert shaped_B.tolist() == [1.0, -2.0, 0.25, -1.0]


def test_row_05_running_moments():
    x, every = randn(50) * 3 + 100, torch.ones(50, dtype=torch.bool)
    running = pm.RunningMoments()
    assert (running.mean, running.std) == (0.0, 1.0)
    for part in (x[:7], x[7:8], x[8:8], x[8:]):
        running = running.updated(pm.moments(part, every[: len(part)]))
    assert running.count == 50
    assert running.mean == pytest.approx(float(x.mean()), rel=1e-13)
    assert running.std == pytest.approx(float(x.std(correction=0)), rel=1e-10)
    # Scores that are all alike so far say nothing about their scale.
    constant = pm.RunningMoments().updated(pm.moments(torch.full((9,), 0.1), every[:9]))
    assert (round(constant.mean, 6), constant.std) == (0.1, 1.0)


# ---- KL (rows 1, 2, 18, 19) -----------------------------------------------------------------------------------------


def test_row_01_kl_penalty_is_signed_and_unscaled():
    logprobs_BG, ref_BG = tensor([-1.0, -2.0, -0.5, NAN]), tensor([-2.0, -1.0, -0.5, NAN])
    mask_BG = torch.tensor([[True, True, True, False]])
    kl_BG = pm.token_kl(logprobs_BG, ref_BG, mask_BG)
    assert kl_BG.tolist() == [[1.0, -1.0, 0.0, 0.0]]
    rewards_BG = pm.token_rewards(tensor(3.0), kl_BG, mask_BG, kl_coef=0.1)
    torch.testing.assert_close(rewards_BG, tensor([-0.1, 0.1, 3.0, 0.0]))


def test_row_02_kl_coef():
    assert pm.next_kl_coef(0.1, 99.0, 512, target=None) == 0.1
    assert pm.next_kl_coef(0.1, 6.0, 512) == 0.1
    assert pm.next_kl_coef(0.1, 6.6, 500) == pytest.approx(0.1 * (1 + 0.1 * 0.05))
    assert pm.next_kl_coef(0.1, 60.0, 500) == pytest.approx(0.1 * (1 + 0.2 * 0.05))
    assert pm.next_kl_coef(0.1, -60.0, 500) == pytest.approx(0.1 * (1 - 0.2 * 0.05))
    assert pm.next_kl_coef(0.1, 4.0, 10, target=2.0, horizon=100) == pytest.approx(0.1 * (1 + 0.2 * 0.1))


def test_row_18_approx_kl_sign_and_value():
    """E_old[exp(d) - 1 - d] = KL(old || new) with d = new - old; with old - new it would be another number."""
    old_logits, new_logits = randn(5, seed=1), randn(5, seed=2)
    old_V, new_V = old_logits.log_softmax(0), new_logits.log_softmax(0)
    kl = float((old_V.exp() * (old_V - new_V)).sum())
    tokens = torch.multinomial(old_V.exp(), 200_000, replacement=True, generator=torch.Generator().manual_seed(3))
    mask = torch.ones(1, len(tokens), dtype=torch.bool)
    _, sums = pm.policy_loss_sum(new_V[tokens][None], old_V[tokens][None], torch.ones(1, len(tokens)).double(), mask)
    mean = {name: float(value / sums["num_tokens"]) for name, value in sums.items()}
    assert mean["approx_kl"] == pytest.approx(kl, rel=0.03)
    assert mean["ratio"] == pytest.approx(1.0, abs=0.02)
    # Both forms, by hand, on one token that became twice as likely: d = log 2.
    _, sums = pm.policy_loss_sum(tensor([-1.0]), tensor([-1.0 - math.log(2)]), tensor([1.0]), mask[:, :1])
    assert float(sums["approx_kl"]) == pytest.approx(2 - 1 - math.log(2))
    assert float(sums["approx_kl_sq"]) == pytest.approx(math.log(2) ** 2 / 2)
    assert float(sums["ratio"]) == pytest.approx(2.0)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20))
@settings(max_examples=30, deadline=None)
def test_row_18_approx_kl_is_never_negative(differences):
    d_BG = tensor(differences)
    _, sums = pm.policy_loss_sum(d_BG - 1, torch.full_like(d_BG, -1.0), d_BG, torch.ones_like(d_BG, dtype=torch.bool))
    assert sums["approx_kl"] >= 0 and sums["approx_kl_sq"] >= 0


def test_row_19_early_stop_is_decided_on_global_sums():
    """Two ranks that would disagree by themselves."""
    local = [(0.5, 10), (0.1, 30)]  # sums of approx_kl and tokens: means 0.05 and 0.0033
    assert [pm.kl_exceeds(*rank, limit=0.02) for rank in local] == [True, False]
    assert not pm.kl_exceeds(0.6, 40, limit=0.02)
    assert pm.kl_exceeds(0.6, 40, limit=0.01)
    assert not pm.kl_exceeds(99.0, 1, limit=None)
    assert not pm.kl_exceeds(0.0, 0, limit=0.1)
    assert pm.kl_exceeds(NAN, 40, limit=0.1)


# ---- GAE and returns (rows 6, 7) ------------------------------------------------------------------------------------


def gae_double_sum(rewards, values, gamma, lam, last_value):
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, for one unmasked sequence."""
    v = [*values, last_value]
    delta = [rewards[t] + gamma * v[t + 1] - v[t] for t in range(len(rewards))]
    return [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, len(delta))) for t in range(len(delta))]


@given(
    num_rows=st.integers(1, 5),
    num_tokens=st.integers(1, 9),
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_row_06_gae_is_the_double_sum_over_the_mask(num_rows, num_tokens, gamma, lam, seed):
    """Invariant 3: under any mask it is the double sum of the tokens that remain; masked entries are never read."""
    mask_BG = random_mask(num_rows, num_tokens, seed)
    rewards_BG = torch.where(mask_BG, randn(num_rows, num_tokens, seed=seed), NAN)
    values_BG1 = randn(num_rows, num_tokens + 1, seed=seed + 1)
    bootstrap_B = random_mask(num_rows, 1, seed + 2)[:, 0]
    after_B = pm.last_index(mask_BG) + 1
    read_BG1 = torch.cat([mask_BG, torch.zeros(num_rows, 1, dtype=torch.bool)], 1)
    read_BG1[torch.arange(num_rows), after_B] |= bootstrap_B
    values_BG1 = torch.where(read_BG1, values_BG1, NAN)
    advantages_BG, returns_BG = pm.gae(rewards_BG, values_BG1, mask_BG, gamma=gamma, lam=lam, bootstrap_B=bootstrap_B)
    for b in range(num_rows):
        keep = mask_BG[b]
        last_value = float(values_BG1[b, after_B[b]]) if bootstrap_B[b] else 0.0
        values = values_BG1[b, :-1][keep].tolist()
        expected = gae_double_sum(rewards_BG[b][keep].tolist(), values, gamma, lam, last_value)
        assert advantages_BG[b][keep].tolist() == pytest.approx(expected, abs=1e-12)
        assert returns_BG[b][keep].tolist() == pytest.approx([a + v for a, v in zip(expected, values, strict=True)])
        assert (advantages_BG[b][~keep] == 0).all() and (returns_BG[b][~keep] == 0).all()


def test_row_06_value_after_eos_is_zero_and_bootstrap_only_where_asked():
    rewards_BG, values_BG1 = tensor([1.0, 0.0], [1.0, 1.0]), tensor([0.5, 9.0, 9.0], [0.5, 0.25, 2.0])
    mask_BG = torch.tensor([[True, False], [True, True]])
    advantages_BG, _ = pm.gae(rewards_BG, values_BG1, mask_BG, gamma=1.0, lam=0.0)
    assert advantages_BG.tolist() == [[0.5, 0.0], [0.75, 0.75]]
    advantages_BG, _ = pm.gae(
        rewards_BG, values_BG1, mask_BG, gamma=1.0, lam=0.0, bootstrap_B=torch.tensor([False, True])
    )
    assert advantages_BG.tolist() == [[0.5, 0.0], [0.75, 2.75]]


def test_row_07_returns_are_unwhitened_advantages_plus_values():
    rewards_BG, values_BG1, mask_BG = randn(4, 6), randn(4, 7, seed=1), torch.ones(4, 6, dtype=torch.bool)
    advantages_BG, returns_BG = pm.gae(rewards_BG, values_BG1, mask_BG)
    torch.testing.assert_close(returns_BG, advantages_BG + values_BG1[:, :-1])
    # gamma = lam = 1: the return is the reward to go.
    _, returns_BG = pm.gae(rewards_BG, values_BG1, mask_BG, gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns_BG, rewards_BG.flip(1).cumsum(1).flip(1))


# ---- whitening (row 8) ----------------------------------------------------------------------------------------------


def test_row_08_example():
    x = tensor([1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0])
    mean, variance = pm.mean_and_variance(pm.moments(x, torch.ones_like(x, dtype=torch.bool)))
    assert round(float(mean), 4) == 1.6
    assert round(float(variance), 4) == 0.0667


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_row_08_global_moments(num_ranks):
    """Shares add up; a rank without a valid token contributes zeros; masked entries and padding are never read."""
    mask_BG = random_mask(8, 5)
    mask_BG[3] = False
    x_BG = torch.where(mask_BG, randn(8, 5) * 2 + 3, NAN)
    total = sum(pm.moments(x, m) for x, m in zip(x_BG.chunk(num_ranks), mask_BG.chunk(num_ranks), strict=True))
    total = total + pm.moments(x_BG[:0], mask_BG[:0])
    valid = x_BG[mask_BG]
    assert total.dtype == torch.float64 and float(total[0]) == len(valid)
    white_BG = pm.whiten(x_BG, mask_BG, total)
    expected = (valid - valid.mean()) / (valid.var(correction=0) + 1e-8).sqrt()
    torch.testing.assert_close(white_BG[mask_BG], expected)
    assert (white_BG[~mask_BG] == 0).all()


def test_row_08_edges():
    """No token at all, one token, and float32 with a large mean (accumulated in float64)."""
    x_BG, none_BG = randn(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    assert pm.moments(x_BG, none_BG).tolist() == [0, 0, 0]
    assert (pm.whiten(x_BG, none_BG, pm.moments(x_BG, none_BG)) == 0).all()
    one_BG = none_BG.clone()
    one_BG[0, 1] = True
    assert (pm.whiten(x_BG, one_BG, pm.moments(x_BG, one_BG)) == 0).all()

    far = (randn(10_000) + 5000).float()
    every = torch.ones_like(far, dtype=torch.bool)
    white = pm.whiten(far, every, pm.moments(far, every))
    assert white.dtype == torch.float32
    assert abs(float(white.double().mean())) < 1e-6 and abs(float(white.double().var(correction=0)) - 1) < 1e-6


def test_imports_nothing_of_ours():
    tree = ast.parse(Path(pm.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= {"collections", "dataclasses", "math", "torch", "typing"}
