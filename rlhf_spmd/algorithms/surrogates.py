"""The losses of responses with advantages: the policy loss from its parts (ratio, clip, KL term, weights, aggregation),
as the algorithms without a critic use it and as PPO does, and the value loss.

Pure functions of tensors. Losses are *sums* over the mask; the caller divides by a count of the global mini-batch (its
response tokens, or its responses), so results do not depend on ranks or micro-batches.

Legend: B sequences, G response tokens; G is generation.max_new_tokens. mask_BG bool, True on the tokens that are
trained on; elsewhere other [B, G] tensors may hold anything, even NaN; values_BG1 [B, G+1], column t before response
token t.

Sources: [PPO] Schulman et al. 2017, arXiv 1707.06347; [LM] Ziegler et al. 2019, arXiv 1909.08593; [N+] Huang et al.
2024, arXiv 2403.17031; [KL] Schulman 2020, "Approximating KL Divergence"; [DUAL] Ye et al. 2020, arXiv 1912.09729;
[GRPO] Shao et al. 2024, arXiv 2402.03300; [DR] Liu et al. 2025, arXiv 2503.20783; [DAPO] Yu et al. 2025, arXiv
2503.14476; [GSPO] Zheng et al. 2025, arXiv 2507.18071; [RLOO] Ahmadian et al. 2024, arXiv 2402.14740; [V3.2]
DeepSeek-AI 2025, arXiv 2512.02556. Other surrogates than the clipped one are in other_surrogates.py.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from rlhf_spmd.algorithms.advantages import Sums, moments, whitened
from rlhf_spmd.algorithms.importance import (
    MAX_LOG_RATIO,
    held,
    off_policy_weights,
    proximal,
    ratio_of,
    sequence_mean,
)
from rlhf_spmd.algorithms.other_surrogates import terms
from rlhf_spmd.algorithms.page import Aggregation, ImportanceWeights, KLEstimator, RatioLevel, Rejection, Surrogate


def surrogate_loss(
    logprobs_BG: Tensor,
    old_logprobs_BG: Tensor,
    advantages: Tensor,
    mask_BG: Tensor,
    entropy_BG: Tensor | None = None,
    ref_logprobs_BG: Tensor | None = None,
    generator_logprobs_BG: Tensor | None = None,
    *,
    ratio_level: RatioLevel = "token",
    surrogate: Surrogate = "clip",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    gate_temperatures: tuple[float, float] = (1.0, 1.05),
    aggregation: Aggregation = "token-mean",
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    kl_unbiased: bool = False,
    entropy_coef: float = 0.0,
    importance_weights: ImportanceWeights = "none",
    importance_cap: float | None = 2.0,
    rejection: Rejection = "none",
    rejection_range: tuple[float, float] | None = None,
    generator_clip: bool = False,
    lag_share: float | None = None,
) -> tuple[Tensor, Sums]:
    """Returns the loss, aggregated and summed, and sums for the log.

    advantages: of each response [B], or of each token [B, G].
    ratio_level: "sequence" gives every token the geometric mean of the response's ratios ([GSPO] eq. 7); "product"
        their product: the response is one action ([RLOO]).
    kl_unbiased: the KL term is multiplied by the ratio, with its gradient; with k3 and ratios of tokens, the term's
        gradient is then that of the KL itself ([V3.2], unbiased KL estimate).
    generator_logprobs: those of sampling, where old_logprobs are others.
    generator_clip: no loss of tokens that `beyond` finds of the ratio to the generator.
    lag_share: as in `proximal`.
    """
    old_logprobs_BG = proximal(logprobs_BG, old_logprobs_BG, lag_share)
    advantages_BG = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(mask_BG)
    advantages_BG = torch.where(mask_BG, advantages_BG, 0.0)
    log_ratio_BG = torch.where(mask_BG, logprobs_BG - old_logprobs_BG, 0.0)
    d_BG = log_ratio_BG.detach().double()
    ratio_BG = ratio_at(log_ratio_BG, mask_BG, ratio_level)
    clips = {"clip_low": clip_low, "clip_high": clip_high}
    if surrogate == "clip":
        loss_BG = clipped(ratio_BG, advantages_BG, **clips, dual_clip=dual_clip)
        below_BG = (ratio_BG < 1.0 - clip_low) & (advantages_BG < 0)
        above_BG = (ratio_BG > 1.0 + clip_high) & (advantages_BG > 0)
    else:
        given = (logprobs_BG, old_logprobs_BG, log_ratio_BG, ratio_BG, advantages_BG, mask_BG)
        loss_BG, below_BG, above_BG = terms(surrogate, *given, **clips, gate_temperatures=gate_temperatures)
    num_tokens, num_responses = mask_BG.sum().double(), mask_BG.any(1).sum().double()
    sums: Sums = {
        "clip_fraction_low": ((below_BG & mask_BG).sum().double(), num_tokens),
        "clip_fraction_high": ((above_BG & mask_BG).sum().double(), num_tokens),
        "ratio": (torch.where(mask_BG, ratio_BG.detach().double(), 0.0).sum(), num_tokens),
        "approx_kl": (kl_estimate(-d_BG, "k3").sum(), num_tokens),
    }
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
        sums |= counted
        if generator_clip:
            drawn_BG = ratio_at((logprobs_BG - generator_logprobs_BG).detach(), mask_BG, ratio_level)
            far_BG = beyond(drawn_BG, advantages_BG, clip_low=clip_low, clip_high=clip_high)
            weights_BG = torch.where(far_BG, 0.0, weights_BG)
            sums["generator_clip_fraction"] = far_BG.sum().double(), num_tokens
        loss_BG = loss_BG * weights_BG
    if ref_logprobs_BG is not None:
        difference_BG = torch.where(mask_BG, logprobs_BG - ref_logprobs_BG, 0.0)
        penalty_BG = kl_estimate(difference_BG, kl_estimator) * (ratio_BG if kl_unbiased else 1.0)
        loss_BG = loss_BG + kl_coef * penalty_BG
        kl = difference_BG.detach().double().sum()
        sums |= {"kl": (kl, num_responses), "kl_per_token": (kl, num_tokens)}
        sums["kl_loss"] = penalty_BG.detach().double().sum(), num_tokens
    if entropy_BG is not None:
        loss_BG = loss_BG - entropy_coef * entropy_BG
        sums["entropy"] = torch.where(mask_BG, entropy_BG, 0.0).detach().double().sum(), num_tokens
    loss_sum = aggregated(loss_BG, mask_BG, aggregation)
    num = num_tokens if aggregation == "token-mean" else num_responses
    return loss_sum, sums | {"policy_loss": (loss_sum.detach().double(), num)}


# ---- of PPO ----------------------------------------------------------------------------------------------------------


def policy_loss(
    logprobs_BG: Tensor,
    old_logprobs_BG: Tensor,
    advantages_BG: Tensor,
    mask_BG: Tensor,
    entropy_BG: Tensor | None = None,
    generator_logprobs_BG: Tensor | None = None,
    start_logprobs_BG: Tensor | None = None,
    *,
    clip_ratio: float = 0.2,
    entropy_coef: float = 0.0,
    importance_weights: ImportanceWeights = "none",
    importance_cap: float | None = 2.0,
    rejection: Rejection = "none",
    rejection_range: tuple[float, float] | None = None,
    generator_clip: bool = False,
    lag_share: float | None = None,
) -> tuple[Tensor, Sums]:
    """Returns PPO's clipped surrogate ([PPO] eq. 7, negated) *summed* over the mask, and sums for the log. It
    is `surrogate_loss` of tokens with one range of the ratio,

        loss = max(-A ratio, -A clip(ratio, 1 - c, 1 + c)),     ratio = exp(d),  d = new logprob - old logprob

    less entropy_coef * H[pi(. | before the token)] (eq. 9) where the entropies are given. `approx_kl` sums exp(d) - 1 -
    d, which is never negative and an unbiased estimate of KL(old || new) [KL]; `approx_kl_sq` sums d^2 / 2, its
    second-order form. Both are from start_logprobs, those with which training begins, where these are given.
    """
    old_logprobs_BG = proximal(logprobs_BG, old_logprobs_BG, lag_share)
    loss_sum, sums = surrogate_loss(
        logprobs_BG,
        old_logprobs_BG,
        advantages_BG,
        mask_BG,
        generator_logprobs_BG=generator_logprobs_BG,
        clip_low=clip_ratio,
        clip_high=clip_ratio,
        importance_weights=importance_weights,
        importance_cap=importance_cap,
        rejection=rejection,
        rejection_range=rejection_range,
        generator_clip=generator_clip,
    )
    (low, num_tokens), (high, _) = sums.pop("clip_fraction_low"), sums.pop("clip_fraction_high")
    d_BG = torch.where(mask_BG, logprobs_BG - old_logprobs_BG, 0.0).detach().double()
    start_BG = old_logprobs_BG if start_logprobs_BG is None else start_logprobs_BG
    moved_BG = torch.where(mask_BG, logprobs_BG - start_BG, 0.0).detach().double()
    own: Sums = {
        "policy_loss": sums["policy_loss"],
        "clip_fraction": (low + high, num_tokens),
        "ratio": (torch.where(mask_BG, ratio_of(d_BG), 0.0).sum(), num_tokens),  # of wide numbers
        "approx_kl": (kl_estimate(-moved_BG, "k3").sum(), num_tokens),
        "approx_kl_sq": (0.5 * moved_BG.square().sum(), num_tokens),
    }
    if entropy_BG is not None:
        entropy_sum = torch.where(mask_BG, entropy_BG, 0.0).sum()
        loss_sum = loss_sum - entropy_coef * entropy_sum
        own["entropy"] = entropy_sum.detach().double(), num_tokens
    return loss_sum, own | {name: one for name, one in sums.items() if name not in own}


def policy_loss_sums(advantages_BG: Tensor, mask_BG: Tensor) -> Tensor:
    """Returns sum and sum of squares of the advantages of a mini-batch, float64 [2]."""
    return moments(advantages_BG, mask_BG)[1:]


def policy_loss_prepare(
    advantages_BG: Tensor, mask_BG: Tensor, sums: Tensor, divisor: Tensor, *, whiten: Literal["mini_batch", "batch"]
) -> dict[str, Tensor]:
    """Returns advantages whitened over the global mini-batch, unless the whole batch has been ([N+])."""
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
    """Returns value_coef max((V - R)^2, (clip(V, V_old +- clip_value) - R)^2), *summed* ([LM]), and log sums."""
    values_BG = torch.where(mask_BG, values_BG1[:, :-1], 0.0)
    old_BG = torch.where(mask_BG, old_values_BG1[:, :-1], 0.0)
    returns_BG = torch.where(mask_BG, returns_BG, 0.0)
    near_BG = torch.clamp(values_BG, old_BG - clip_value, old_BG + clip_value)
    free_BG, clipped_BG = (values_BG - returns_BG).square(), (near_BG - returns_BG).square()
    loss_sum, num_tokens = value_coef * torch.maximum(free_BG, clipped_BG).sum(), mask_BG.sum().double()
    sums = {
        "value_loss": loss_sum.detach().double(),
        "value_clip_fraction": (clipped_BG > free_BG).sum().double(),
        "value_error_sq": free_BG.detach().double().sum(),
    }
    return loss_sum, {name: (total, num_tokens) for name, total in sums.items()}


# ---- parts ----------------------------------------------------------------------------------------------------------


def clipped(
    ratio_BG: Tensor, advantages_BG: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Returns -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) ([PPO] eq. 7; two bounds: [DAPO] eq. 10). With
    dual_clip c, the loss is at most -c A where A < 0 ([DUAL] eq. 5)."""
    free_BG = -advantages_BG * ratio_BG
    loss_BG = torch.maximum(free_BG, -advantages_BG * ratio_BG.clamp(1.0 - clip_low, 1.0 + clip_high))
    if dual_clip is not None:
        loss_BG = torch.where(advantages_BG < 0, torch.minimum(loss_BG, -dual_clip * advantages_BG), loss_BG)
    return loss_BG


def ratio_at(log_ratio_BG: Tensor, mask_BG: Tensor, level: RatioLevel) -> Tensor:
    """Returns the ratio of each token at a level (`surrogate_loss`); 1 outside the mask."""
    log_ratio_BG = torch.where(mask_BG, log_ratio_BG, 0.0)
    if level == "sequence":
        log_ratio_BG = sequence_mean(log_ratio_BG, mask_BG)
    elif level == "product":
        log_ratio_BG = torch.where(mask_BG, log_ratio_BG.sum(1, keepdim=True), 0.0)
    return ratio_of(log_ratio_BG)


def beyond(ratio_BG: Tensor, advantages_BG: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Returns the tokens whose ratio has left the clip range on the side to which their advantage pushes it: those to
    which `clipped` gives no gradient. A token on the other side is pushed back, so it keeps its gradient; `rejection`,
    which looks at the old policy and not at the new one, leaves out both sides."""
    above_BG = (ratio_BG > 1.0 + clip_high) & (advantages_BG > 0)
    return above_BG | ((ratio_BG < 1.0 - clip_low) & (advantages_BG < 0))


def kl_estimate(difference_BG: Tensor, estimator: KLEstimator) -> Tensor:
    """Returns an estimate of KL(actor || reference) from d = logprob - reference logprob of sampled tokens [KL]: d, d^2
    / 2, or exp(-d) - 1 + d, where k3 and its gradient are held at d = -20. As a term of the loss, only k2 has the
    gradient of the KL on samples of the actor itself, and that of k1 does not depend on the reference."""
    if estimator == "k1":
        return difference_BG
    if estimator == "k2":
        return 0.5 * difference_BG.square()
    held_BG = held(-difference_BG, -math.inf, MAX_LOG_RATIO)
    return held_BG.expm1() - held_BG


def aggregated(loss_BG: Tensor, mask_BG: Tensor, aggregation: Aggregation) -> Tensor:
    """Returns the sum of a loss over sequences: of its tokens (`token-mean`, to be divided by tokens; [DAPO] eq. 12),
    of its mean per token (`seq-mean-token-mean`, by the sequences; [GRPO] eq. 3) or of its sum over tokens divided by
    G, the limit of a response (`seq-mean-token-sum-norm`, by the sequences; [DR] section 3.2)."""
    loss_BG = torch.where(mask_BG, loss_BG, 0.0)
    if aggregation == "token-mean":
        return loss_BG.sum()
    if aggregation == "seq-mean-token-mean":
        return (loss_BG.sum(1) / mask_BG.sum(1).clamp(min=1)).sum()
    return loss_BG.sum() / mask_BG.shape[1]
