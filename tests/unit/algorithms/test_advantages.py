"""The numeric rules of PPO, one test or more per row (the row numbers are those of the project's rule table).

Here: scores, rewards, KL, advantages, whitening. Losses are in test_losses.py, masks in test_masks.py, parity in
test_logprob_parity.py, what changes between steps and iterations in test_controllers.py, whole training steps in
test_slow_ppo.py, the order of rollouts in test_training_order.py, random numbers in test_philox.py.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_spmd.algorithms import advantages, masks
from rlhf_spmd.algorithms.controllers import RunningMoments

EOS = 7
NAN = float("nan")


def tensor(*rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def randn(*shape, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_mask(num_rows: int, num_tokens: int, seed: int = 0) -> Tensor:
    """Returns any mask, holes and empty rows included."""
    return torch.rand(num_rows, num_tokens, generator=torch.Generator().manual_seed(seed)) < 0.6


# ---- GAE and returns (rows 6, 7) ------------------------------------------------------------------------------------


def gae_double_sum(rewards, values, gamma, lam, last_value):
    """Returns A_t = sum over l of (gamma lam)^l delta_{t+l}, for one unmasked sequence."""
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
    after_B = masks.last_index(mask_BG) + 1
    read_BG1 = torch.cat([mask_BG, torch.zeros(num_rows, 1, dtype=torch.bool)], 1)
    read_BG1[torch.arange(num_rows), after_B] |= bootstrap_B
    values_BG1 = torch.where(read_BG1, values_BG1, NAN)
    advantages_BG, returns_BG = advantages.gae(
        rewards_BG, values_BG1, mask_BG, gamma=gamma, lam=lam, bootstrap_B=bootstrap_B
    )
    for b in range(num_rows):
        keep = mask_BG[b]
        last_value = float(values_BG1[b, after_B[b]]) if bootstrap_B[b] else 0.0
        values = values_BG1[b, :-1][keep].tolist()
        expected = gae_double_sum(rewards_BG[b][keep].tolist(), values, gamma, lam, last_value)
        assert advantages_BG[b][keep].tolist() == pytest.approx(expected, abs=1e-12)
        assert returns_BG[b][keep].tolist() == pytest.approx([a + v for a, v in zip(expected, values, strict=True)])
        assert (advantages_BG[b][~keep] == 0).all() and (returns_BG[b][~keep] == 0).all()


# ---- whitening (row 8) ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_row_08_global_moments(num_ranks):
    """Shares add up; a rank without a valid token contributes zeros; masked entries and padding are never read."""
    mask_BG = random_mask(8, 5)
    mask_BG[3] = False
    x_BG = torch.where(mask_BG, randn(8, 5) * 2 + 3, NAN)
    total = sum(advantages.moments(x, m) for x, m in zip(x_BG.chunk(num_ranks), mask_BG.chunk(num_ranks), strict=True))
    total = total + advantages.moments(x_BG[:0], mask_BG[:0])
    valid = x_BG[mask_BG]
    assert total.dtype == torch.float64 and float(total[0]) == len(valid)
    white_BG = advantages.whitened(x_BG, mask_BG, total)
    expected = (valid - valid.mean()) / (valid.var(correction=0) + 1e-8).sqrt()
    torch.testing.assert_close(white_BG[mask_BG], expected)
    assert (white_BG[~mask_BG] == 0).all()


def test_row_08_edges():
    """No token at all, one token, and float32 with a large mean (accumulated in float64)."""
    x_BG, none_BG = randn(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    assert advantages.moments(x_BG, none_BG).tolist() == [0, 0, 0]
    assert (advantages.whitened(x_BG, none_BG, advantages.moments(x_BG, none_BG)) == 0).all()
    one_BG = none_BG.clone()
    one_BG[0, 1] = True
    assert (advantages.whitened(x_BG, one_BG, advantages.moments(x_BG, one_BG)) == 0).all()

    far = (randn(10_000) + 5000).float()
    every = torch.ones_like(far, dtype=torch.bool)
    white = advantages.whitened(far, every, advantages.moments(far, every))
    assert white.dtype == torch.float32
    assert abs(float(white.double().mean())) < 1e-6 and abs(float(white.double().var(correction=0)) - 1) < 1e-6


# ---- the call -------------------------------------------------------------------------------------------------------


def rows_of(seed: int = 0) -> dict[str, Tensor]:
    """Returns what the call of PPO reads, of four rows; the last one has no token."""
    mask_BG = torch.tensor([[True, True, True], [True, True, False], [True, False, False], [False, False, False]])
    return {
        "logprobs_BG": torch.where(mask_BG, randn(4, 3, seed=seed), NAN),
        "ref_logprobs_BG": torch.where(mask_BG, randn(4, 3, seed=seed + 1), NAN),
        "scores_B": randn(4, seed=seed + 2),
        "values_BG1": randn(4, 4, seed=seed + 3),
        "mask_BG": mask_BG,
        "ended_B": torch.tensor([False, True, True, False]),
    }


OPTIONS = {
    "kl_coef": 0.3,
    "score_moments": RunningMoments(),
    "value_moments": RunningMoments(),
    "gamma": 0.9,
    "lam": 0.8,
    "truncation": "penalty",
    "truncation_penalty": -2.0,
    "clip_score": None,
    "normalize_scores": False,
    "normalize_values": False,
}


@pytest.mark.parametrize("changes", [{}, {"truncation": "bootstrap"}, {"truncation": "score", "clip_score": 0.5}])
def test_estimate_advantages_puts_the_rules_together(changes):
    rows, options = rows_of(), OPTIONS | changes
    mask_BG, ended_B = rows["mask_BG"], rows["ended_B"]
    shaped = {name: options[name] for name in ("truncation", "truncation_penalty", "clip_score")}
    scores_B = advantages.shaped_scores(rows["scores_B"], ended_B, **shaped)
    kl_BG = advantages.token_kl(rows["logprobs_BG"], rows["ref_logprobs_BG"], mask_BG)
    rewards_BG = advantages.token_rewards(scores_B, kl_BG, mask_BG, 0.3)
    goes_on_B = ~ended_B if options["truncation"] == "bootstrap" else None
    expected = advantages.gae(rewards_BG, rows["values_BG1"], mask_BG, gamma=0.9, lam=0.8, bootstrap_B=goes_on_B)
    advantages_BG, returns_BG, sums = advantages.estimate_advantages(**rows, **options)
    assert torch.equal(advantages_BG, expected[0]) and torch.equal(returns_BG, expected[1])
    means = {name: (float(total), int(weight)) for name, (total, weight) in sums.items()}
    used_B = rows["scores_B"] if options["truncation"] == "score" else rows["scores_B"][ended_B]
    assert means == {
        "reward": (pytest.approx(float(scores_B.sum())), 4),
        "reward_sq": (pytest.approx(float(scores_B.square().sum())), 4),
        "kl": (pytest.approx(float(kl_BG.sum())), 4),
        "kl_per_token": (pytest.approx(float(kl_BG.sum())), 6),
        "return": (pytest.approx(float(returns_BG.sum())), 6),
        "value": (pytest.approx(float(rows["values_BG1"][:, :-1][mask_BG].sum())), 6),
        "used_score": (pytest.approx(float(used_B.sum())), len(used_B)),
        "used_score_sq": (pytest.approx(float(used_B.square().sum())), len(used_B)),
    }
