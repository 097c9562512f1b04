"""The policy losses that are not clipped as PPO's: each of tokens, before weights and aggregation.

Pure functions of tensors. Legend: B sequences, G response tokens; mask_BG bool, True on the tokens that are trained on;
elsewhere logprobs may hold anything, even NaN.

Sources: [CISPO] MiniMax 2025, arXiv 2506.13585; [DPPO] arXiv 2602.04879; [SAPO] Gao et al. 2025, arXiv 2511.20347;
[GMPO] Zhao et al. 2025, arXiv 2507.20673; [GPG] Chu et al. 2025, arXiv 2504.02546.
"""

import torch
from torch import Tensor

from rlhf_spmd.algorithms.importance import ratio_of, sequence_mean
from rlhf_spmd.algorithms.page import Surrogate

MOST_WEIGHT = 20.0  # of a token's ratio, under surrogate=dppo


def terms(
    surrogate: Surrogate,
    logprobs_BG: Tensor,
    old_logprobs_BG: Tensor,
    log_ratio_BG: Tensor,
    ratio_BG: Tensor,
    advantages_BG: Tensor,
    mask_BG: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    gate_temperatures: tuple[float, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss of each token, and the tokens whose loss the lower and the upper limit change.

    "dppo" is -min(ratio, 20) A logprob with a constant first factor, of the tokens whose probability has not moved by
    more than the limit to where A pushes it ([DPPO], total variation); of "dppo_kl" the limit is of the KL divergence
    between the token and all others. "reinforce" is -A logprob ([GPG]).
    """
    is_bad_BG, is_good_BG = advantages_BG < 0, advantages_BG > 0
    clips, own_BG = {"clip_low": clip_low, "clip_high": clip_high}, torch.where(mask_BG, logprobs_BG, 0.0)
    if surrogate == "cispo":
        loss_BG = cispo(logprobs_BG, ratio_BG, advantages_BG, mask_BG, **clips)
        return loss_BG, ratio_BG < 1.0 - clip_low, ratio_BG > 1.0 + clip_high
    if surrogate in ("dppo", "dppo_kl"):
        old_BG, new_BG = (torch.where(mask_BG, one, 0.0).exp() for one in (old_logprobs_BG, own_BG.detach()))
        moved_BG = new_BG - old_BG
        far_BG = moved_BG.abs() if surrogate == "dppo" else binary_kl(old_BG, new_BG)
        below_BG = (far_BG > clip_low) & (moved_BG < 0) & is_bad_BG
        above_BG = (far_BG > clip_high) & (moved_BG > 0) & is_good_BG
        weight_BG = ratio_BG.detach().clamp(max=MOST_WEIGHT).masked_fill(below_BG | above_BG, 0.0)
        return -weight_BG * advantages_BG * own_BG, below_BG, above_BG
    if surrogate == "gmpo":
        loss_BG = geometric_mean(log_ratio_BG, advantages_BG, mask_BG, **clips)
        return loss_BG, (log_ratio_BG < -clip_low) & is_bad_BG, (log_ratio_BG > clip_high) & is_good_BG
    none_BG = torch.zeros_like(mask_BG)
    if surrogate == "sapo":
        return gated(ratio_BG, advantages_BG, gate_temperatures), none_BG, none_BG
    assert surrogate == "reinforce", surrogate
    return -advantages_BG * own_BG, none_BG, none_BG


def binary_kl(old_BG: Tensor, new_BG: Tensor) -> Tensor:
    """Returns the KL divergence of the old probabilities of a token and of all others from the new ones."""
    others_BG = torch.special.xlogy(1 - old_BG, (1 - old_BG) / (1 - new_BG))
    return torch.special.xlogy(old_BG, old_BG / new_BG) + others_BG


def cispo(
    logprobs_BG: Tensor,
    ratio_BG: Tensor,
    advantages_BG: Tensor,
    mask_BG: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Returns -clip(ratio, 1 - clip_low, 1 + clip_high) A logprob with a constant first factor ([CISPO] eq. 4): no
    token loses its gradient. clip_low=1 sets no lower bound."""
    weight_BG = ratio_BG.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight_BG * advantages_BG * torch.where(mask_BG, logprobs_BG, 0.0)


def gated(ratio_BG: Tensor, advantages_BG: Tensor, temperatures: tuple[float, float]) -> Tensor:
    """Returns -(4 / t) sigmoid(t (ratio - 1)) A, with t for positive and for other advantages ([SAPO] eq. 6): the
    weight of a token falls as its ratio leaves 1, and is never 0."""
    t_BG = torch.where(advantages_BG > 0, *(ratio_BG.new_tensor(t) for t in temperatures))
    return -4.0 / t_BG * torch.sigmoid(t_BG * (ratio_BG - 1.0)) * advantages_BG


def geometric_mean(
    log_ratio_BG: Tensor, advantages_BG: Tensor, mask_BG: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Returns -A times the geometric mean of a response's ratios, whose logarithms are clipped to [-clip_low,
    clip_high] on the side to which A pushes them ([GMPO] eq. 4): the same for each of its tokens."""
    near_BG, sign_BG = log_ratio_BG.clamp(-clip_low, clip_high), advantages_BG.sign()
    least_BG = sign_BG * torch.minimum(sign_BG * log_ratio_BG, sign_BG * near_BG)
    return -advantages_BG * ratio_of(sequence_mean(least_BG, mask_BG))
