"""The losses of workflows: pure functions that return a *sum* over the mask, and sums for the log.

The caller divides by a count of the global mini-batch, so results do not depend on ranks or micro-batches.

Legend: B sequences, G response tokens; mask_BG bool, True on the tokens that are trained on; elsewhere other [B, G]
tensors may hold anything, even NaN; values_BG1 [B, G+1], column t before response token t.

Sources: [PPO] Schulman et al. 2017, arXiv 1707.06347; [LM] Ziegler et al. 2019, arXiv 1909.08593; [KL] Schulman 2020,
"Approximating KL Divergence"; [N+] Huang et al. 2024, arXiv 2403.17031.
"""

from typing import Literal

import torch
from torch import Tensor

from rlhf_spmd.algorithms.advantages import Sums, moments, whitened
from rlhf_spmd.algorithms.surrogates import clipped, kl_estimate, off_policy_weights, ratio_of


def policy_loss(
    logprobs_BG: Tensor,
    old_logprobs_BG: Tensor,
    advantages_BG: Tensor,
    mask_BG: Tensor,
    entropy_BG: Tensor | None = None,
    generator_logprobs_BG: Tensor | None = None,
    *,
    clip_ratio: float = 0.2,
    entropy_coef: float = 0.0,
    importance_weights: Literal["none", "token", "sequence"] = "none",
    importance_cap: float = 2.0,
    rejection: Literal["none", "token", "sequence", "geometric"] = "none",
    rejection_range: tuple[float, float] | None = None,
) -> tuple[Tensor, Sums]:
    """The clipped surrogate ([PPO] eq. 7, negated) *summed* over the mask, and sums for the log.

        loss = max(-A ratio, -A clip(ratio, 1 - c, 1 + c)),     ratio = exp(d),  d = new logprob - old logprob

    less entropy_coef * H[pi(. | before the token)] (eq. 9) where the entropies are given. `approx_kl` sums exp(d) - 1 -
    d, which is never negative and an unbiased estimate of KL(old || new) [KL]; `approx_kl_sq` sums d^2 / 2, its
    second-order form. generator_logprobs: of the tokens as they were drawn, where old_logprobs are another pass; the
    surrogate is then multiplied by `off_policy_weights` (surrogates.py).
    """
    difference_BG = torch.where(mask_BG, logprobs_BG - old_logprobs_BG, 0.0)
    ratio_BG = ratio_of(difference_BG)
    advantages_BG = torch.where(mask_BG, advantages_BG, 0.0)
    loss_BG = clipped(ratio_BG, advantages_BG, clip_low=clip_ratio, clip_high=clip_ratio)
    num_clipped = (loss_BG > -advantages_BG * ratio_BG).sum().double()
    counted: Sums = {}
    if generator_logprobs_BG is not None:
        weights_BG, counted = off_policy_weights(
            old_logprobs_BG,
            generator_logprobs_BG,
            mask_BG,
            importance_weights=importance_weights,
            importance_cap=importance_cap,
            rejection=rejection,
            rejection_range=rejection_range,
        )
        loss_BG = loss_BG * weights_BG
    loss_sum = torch.where(mask_BG, loss_BG, 0.0).sum()
    d_BG = difference_BG.detach().double()
    sums = {
        "policy_loss": loss_sum.detach().double(),
        "clip_fraction": num_clipped,
        "ratio": torch.where(mask_BG, ratio_of(d_BG), 0.0).sum(),
        "approx_kl": kl_estimate(-d_BG, "k3").sum(),
        "approx_kl_sq": 0.5 * d_BG.square().sum(),
    }
    if entropy_BG is not None:
        entropy_sum = torch.where(mask_BG, entropy_BG, 0.0).sum()
        loss_sum = loss_sum - entropy_coef * entropy_sum
        sums["entropy"] = entropy_sum.detach().double()
    return loss_sum, _per_token(sums, mask_BG) | counted


def policy_loss_sums(advantages_BG: Tensor, mask_BG: Tensor) -> Tensor:
    """Sum and sum of squares of the advantages of a mini-batch, float64 [2]."""
    return moments(advantages_BG, mask_BG)[1:]


def policy_loss_prepare(
    advantages_BG: Tensor, mask_BG: Tensor, sums: Tensor, divisor: Tensor, *, whiten: Literal["mini_batch", "batch"]
) -> dict[str, Tensor]:
    """Advantages whitened over the global mini-batch, unless the whole batch has been ([N+])."""
    if whiten != "mini_batch":
        return {}
    return {"advantages": whitened(advantages_BG, mask_BG, torch.cat((divisor[None], sums)))}


def value_loss(
    values_BG1: Tensor,
    old_values_BG1: Tensor,
    returns_BG: Tensor,
    mask_BG: Tensor,
    *,
    clip_value: float = 0.2,
    value_coef: float = 0.5,
) -> tuple[Tensor, Sums]:
    """value_coef * max((V - R)^2, (clip(V, V_old +- clip_value) - R)^2) *summed* over the mask ([LM]), and log sums."""
    values_BG = torch.where(mask_BG, values_BG1[:, :-1], 0.0)
    old_BG = torch.where(mask_BG, old_values_BG1[:, :-1], 0.0)
    returns_BG = torch.where(mask_BG, returns_BG, 0.0)
    near_BG = torch.clamp(values_BG, old_BG - clip_value, old_BG + clip_value)
    free_BG, clipped_BG = (values_BG - returns_BG).square(), (near_BG - returns_BG).square()
    loss_sum = value_coef * torch.maximum(free_BG, clipped_BG).sum()
    sums = {
        "value_loss": loss_sum.detach().double(),
        "value_clip_fraction": (clipped_BG > free_BG).sum().double(),
        "value_error_sq": free_BG.detach().double().sum(),
    }
    return loss_sum, _per_token(sums, mask_BG)


def _per_token(sums: dict[str, Tensor], mask_BG: Tensor) -> Sums:
    """Sums whose means are over the response tokens."""
    num_tokens = mask_BG.sum().double()
    return {name: (total, num_tokens) for name, total in sums.items()}
