"""Rewards, advantages and returns: pure functions of tensors and numbers, among them the computes of workflows.

Means and variances are returned as *sums*, which the caller adds over all data-parallel ranks, so results do not depend
on the number of ranks. A rank without data contributes empty tensors, whose sums are zeros.

Legend: B sequences, G response tokens.
 mask_BG       bool, True on the tokens that are trained on; elsewhere other [B, G] tensors may hold anything, even NaN
 values_BG1    [B, G+1]; column t is the value before response token t is emitted

Sources: [GAE] Schulman et al. 2015, arXiv 1506.02438; [LM] Ziegler et al. 2019, arXiv 1909.08593; [N+] Huang et al.
2024, arXiv 2403.17031.
"""

from typing import Literal

import torch
from torch import Tensor

from rlhf_spmd.algorithms.controllers import RunningMoments
from rlhf_spmd.algorithms.masks import last_index

WHITEN_EPS = 1e-8  # added to the variance, as in [LM]
Sums = dict[str, tuple[Tensor, Tensor | int]]  # for the log: name -> sum, number of summands

# ---- rewards --------------------------------------------------------------------------------------------------------


def shaped_scores(
    scores_B: Tensor,
    ended_B: Tensor,
    *,
    truncation: Literal["penalty", "bootstrap", "score"] = "penalty",
    truncation_penalty: float = -1.0,
    clip_score: float | None = None,
    mean: float = 0.0,
    std: float = 1.0,
) -> Tensor:
    """Returns the score that enters the rewards: (score - mean) / std, then clipped to +-clip_score: [B].

    A truncated response has no meaningful score. It gets the fixed `truncation_penalty` ([N+]; neither normalised nor
    clipped), or 0 under "bootstrap", where `gae` adds its last value. "score" keeps the score, for tasks whose
    responses all have the full length ([LM]'s 24 tokens).
    """
    assert truncation in ("penalty", "bootstrap", "score") and std > 0
    shaped_B = (scores_B - mean) / std
    if clip_score is not None:
        shaped_B = shaped_B.clamp(-clip_score, clip_score)
    if truncation == "score":
        return shaped_B
    return torch.where(ended_B, shaped_B, truncation_penalty if truncation == "penalty" else 0.0)


def token_kl(logprobs_BG: Tensor, ref_logprobs_BG: Tensor, mask_BG: Tensor) -> Tensor:
    """Returns log pi_actor - log pi_reference on the sampled token, signed, 0 outside the mask ([LM] eq. 2): [B, G]."""
    return torch.where(mask_BG, logprobs_BG - ref_logprobs_BG, 0.0)


def token_rewards(scores_B: Tensor, kl_BG: Tensor, mask_BG: Tensor, kl_coef: float) -> Tensor:
    """Returns -kl_coef * kl on every token, plus the (shaped) score on the last real one ([LM] eq. 2): [B, G]."""
    is_last_BG = torch.arange(mask_BG.shape[1], device=mask_BG.device) == last_index(mask_BG)[:, None]
    penalty_BG = torch.where(mask_BG, -kl_coef * kl_BG, 0.0)
    return penalty_BG + torch.where(is_last_BG, scores_B[:, None].to(kl_BG.dtype), 0.0)


# ---- advantages -----------------------------------------------------------------------------------------------------


def gae(
    rewards_BG: Tensor,
    values_BG1: Tensor,
    mask_BG: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns generalized advantage estimates and returns, both [B, G] and 0 outside the mask ([GAE] eq. 16).

        delta_t = r_t + gamma V_{t+1} - V_t,     A_t = delta_t + gamma lam A_{t+1},     R_t = A_t + V_t

    where t+1 is the next token that the mask selects. After the last one V is 0, or, for the rows in `bootstrap_B`
    (bool [B]; truncated responses), the value in the next column.
    """
    values_BG = values_BG1[:, :-1]
    next_value_B = torch.zeros_like(values_BG1[:, 0])
    if bootstrap_B is not None:
        after_B = values_BG1.gather(1, last_index(mask_BG)[:, None] + 1)[:, 0]
        next_value_B = torch.where(bootstrap_B, after_B, 0.0)
    next_advantage_B = torch.zeros_like(next_value_B)
    advantages_BG = torch.zeros_like(values_BG)
    for t in reversed(range(mask_BG.shape[1])):
        delta_B = rewards_BG[:, t] + gamma * next_value_B - values_BG[:, t]
        next_advantage_B = torch.where(mask_BG[:, t], delta_B + gamma * lam * next_advantage_B, next_advantage_B)
        next_value_B = torch.where(mask_BG[:, t], values_BG[:, t], next_value_B)
        advantages_BG[:, t] = torch.where(mask_BG[:, t], next_advantage_B, 0.0)
    return advantages_BG, torch.where(mask_BG, advantages_BG + values_BG, 0.0)


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """Returns (count, sum, sum of squares) of x over the mask, float64 [3], to be added over micro-batches and ranks.
    Precise enough while |mean| < 1e4 std."""
    real = torch.where(mask, x.double(), 0.0)
    return torch.stack([mask.sum().double(), real.sum(), real.square().sum()])


def mean_and_variance(moments_3: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and *population* variance (divided by N); both 0 if the count is 0."""
    count, total, squares = moments_3.unbind()
    mean = total / count.clamp(min=1.0)
    return mean, (squares / count.clamp(min=1.0) - mean.square()).clamp(min=0.0)


def whitened(x: Tensor, mask: Tensor, moments_3: Tensor) -> Tensor:
    """Returns (x - mean) / sqrt(variance + 1e-8) by the *global* moments, 0 outside the mask."""
    mean, variance = mean_and_variance(moments_3)
    return torch.where(mask, (x.double() - mean) * torch.rsqrt(variance + WHITEN_EPS), 0.0).to(x.dtype)


# ---- of PPO ---------------------------------------------------------------------------------------------------------


def estimate_advantages(
    logprobs_BG: Tensor,
    ref_logprobs_BG: Tensor,
    scores_B: Tensor,
    values_BG1: Tensor,
    mask_BG: Tensor,
    ended_B: Tensor,
    *,
    kl_coef: float,
    score_moments: RunningMoments,
    value_moments: RunningMoments,
    gamma: float,
    lam: float,
    truncation: Literal["penalty", "bootstrap", "score"],
    truncation_penalty: float,
    clip_score: float | None,
    normalize_scores: bool,
    normalize_values: bool,
) -> tuple[Tensor, Tensor, Sums]:
    """Computes rewards (scores minus the KL penalty of every token), then GAE: advantages_BG, returns_BG and sums.

    With normalize_values, values and the returned returns are those less the mean of `value_moments`, divided by their
    standard deviation. The sum used_score is over the responses with a meaningful score, for `score_moments`.
    """
    shaped_B = shaped_scores(
        scores_B,
        ended_B,
        truncation=truncation,
        truncation_penalty=truncation_penalty,
        clip_score=clip_score,
        mean=score_moments.mean if normalize_scores else 0.0,
        std=score_moments.std if normalize_scores else 1.0,
    )
    kl_BG = token_kl(logprobs_BG, ref_logprobs_BG, mask_BG)
    rewards_BG = token_rewards(shaped_B, kl_BG, mask_BG, kl_coef)
    bootstrap_B = ~ended_B if truncation == "bootstrap" else None
    mean, std = (value_moments.mean, value_moments.std) if normalize_values else (0.0, 1.0)
    values_BG1 = values_BG1 * std + mean
    advantages_BG, returns_BG = gae(rewards_BG, values_BG1, mask_BG, gamma=gamma, lam=lam, bootstrap_B=bootstrap_B)
    used_B = scores_B.double()[torch.ones_like(ended_B) if truncation == "score" else ended_B]
    num_rows, num_tokens = len(scores_B), mask_BG.sum()
    wide_B, kl = shaped_B.double(), kl_BG.double().sum()
    sums = {
        "reward": (wide_B.sum(), num_rows),
        "reward_sq": (wide_B.square().sum(), num_rows),
        "kl": (kl, num_rows),
        "kl_per_token": (kl, num_tokens),
        "return": (returns_BG.double().sum(), num_tokens),
        "value": (torch.where(mask_BG, values_BG1[:, :-1], 0.0).double().sum(), num_tokens),
        "used_score": (used_B.sum(), len(used_B)),
        "used_score_sq": (used_B.square().sum(), len(used_B)),
    }
    if normalize_values:
        wide = torch.where(mask_BG, returns_BG, 0.0).double()
        sums |= {"used_return": (wide.sum(), num_tokens), "used_return_sq": (wide.square().sum(), num_tokens)}
    return advantages_BG, torch.where(mask_BG, (returns_BG - mean) / std, 0.0), sums


def estimate_advantages_sums(advantages_BG: Tensor, mask_BG: Tensor) -> Tensor:
    """Returns the sums for whitening over the whole batch, float64 [3]."""
    return moments(advantages_BG, mask_BG)


def estimate_advantages_finish(
    advantages_BG: Tensor, returns_BG: Tensor, mask_BG: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns whitened advantages, and unchanged returns."""
    return whitened(advantages_BG, mask_BG, sums), returns_BG
