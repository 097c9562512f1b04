"""Ratios of probabilities, and weights of a loss where the policy that sampled is not quite the one that trains.

Pure functions of tensors. Legend: B sequences, G response tokens; mask_BG bool, True on the tokens that are trained on;
elsewhere other [B, G] tensors may hold anything, even NaN.

Sources: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (truncated importance
weights); Ring-1T 2025, arXiv 2510.18855 (IcePop); [AREAL] Fu et al. 2025, arXiv 2505.24298; [A3PO] 2025, arXiv
2512.06547.
"""

import math
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.algorithms.advantages import Sums
from rlhf_spmd.algorithms.page import ImportanceWeights, Rejection

MAX_LOG_RATIO = 20.0  # nats: beyond it exp, and its gradient, are held at what they are there
# default ranges of weights that rejection keeps
REJECTED = {"none": (0.0, math.inf), "token": (0.5, 5.0), "sequence": (0.5, 2.0), "geometric": (0.999, 1.001)}


class _Held(torch.autograd.Function):
    """x, held between two bounds, with the gradient of x: a term that grows beyond a bound stops growing, and its
    gradient keeps its sign and stays finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def held(x: Tensor, low: float, high: float) -> Tensor:
    """Clamps x between two bounds, but keeps the gradient of x."""
    made: Tensor = _Held.apply(x, low, high)
    return made


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Returns exp of a log-ratio that is clamped to +-20 nats. An infinite ratio would make NaN of the zero gradient of
    a token that is clipped."""
    return held(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_mean(x_BG: Tensor, mask_BG: Tensor) -> Tensor:
    """Returns the mean over a response's tokens, for each of them: [B, G]."""
    mean_B = torch.where(mask_BG, x_BG, 0.0).sum(1) / mask_BG.sum(1).clamp(min=1)
    return torch.where(mask_BG, mean_B[:, None], 0.0)


def proximal(logprobs_BG: Tensor, old_logprobs_BG: Tensor, lag_share: float | None) -> Tensor:
    """Returns the old logprobs of a loss: as they are or, with a lag_share, those of a proximal policy without a
    forward pass of it. These lie on the line from the generator's, which are given, to those of now ([A3PO]): ln prox =
    ln mu + a (ln pi - ln mu), without a gradient.

    lag_share: a = (v_prox - v_mu) / (v_pi - v_mu), where v counts the optimizer steps before a policy, and prox is the
        policy with which the training of the batch begins. At the first step a = 1, and the ratio pi / prox is exactly
        1.
    """
    if lag_share is None:
        return old_logprobs_BG
    return torch.lerp(old_logprobs_BG, logprobs_BG.detach(), lag_share)


def off_policy_weights(
    old_logprobs_BG: Tensor,
    generator_logprobs_BG: Tensor,
    mask_BG: Tensor,
    *,
    importance_weights: ImportanceWeights = "none",
    importance_cap: float | None = 2.0,
    rejection: Rejection = "none",
    rejection_range: tuple[float, float] | None = None,
) -> tuple[Tensor, Sums]:
    """Returns factors of the loss of each token, from w = exp(old logprob - generator's logprob): factors_BG and sums.

    importance_weights: min(w, cap), of the token or of the product over the response.
    rejection: sets the factor to 0 where w (of the token; product or geometric mean over the response) is outside the
        range. Rejected tokens stay in the denominator.

    Sums `importance` and `importance_sq` give the effective sample size (metrics.py) of these factors.
    """
    log_w_BG = torch.where(mask_BG, old_logprobs_BG - generator_logprobs_BG, 0.0).detach().double()
    logs = {"none": torch.zeros_like(log_w_BG), "token": log_w_BG, "sequence": log_w_BG.sum(1, keepdim=True)}
    logs["geometric"] = sequence_mean(log_w_BG, mask_BG)
    w = {name: ratio_of(log).expand_as(mask_BG) for name, log in logs.items()}
    own_BG = w[importance_weights]
    weights_BG = own_BG if importance_weights == "none" else own_BG.clamp(min=0.0, max=importance_cap)
    low, high = rejection_range or REJECTED[rejection]
    is_rejected_BG = (w[rejection] < low) | (w[rejection] > high)
    factors_BG = torch.where(is_rejected_BG, 0.0, weights_BG)
    logged = {"importance_weight": weights_BG, "importance": factors_BG, "importance_sq": factors_BG.square()}
    logged |= {"importance_truncated": weights_BG < own_BG, "rejected": is_rejected_BG}
    num = mask_BG.sum().double()
    sums: Sums = {name: (torch.where(mask_BG, x, 0.0).double().sum(), num) for name, x in logged.items()}
    largest = torch.where(mask_BG, w[rejection] if importance_weights == "none" else own_BG, 0.0).max()
    return factors_BG.to(old_logprobs_BG.dtype), sums | {"importance_max": (largest, num)}
