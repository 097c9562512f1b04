"""The losses of pairs, of which the chosen response is to be better than the rejected one.

Pure functions that return a *sum* over pairs, and sums for the log; the caller divides by the pairs of the global
mini-batch, so results do not depend on ranks or micro-batches.

Legend: B pairs, G response tokens; mask_BG bool, True on response tokens; elsewhere other [B, G] tensors may hold
anything, even NaN. A pair without tokens fills up a micro-batch and counts nothing.

Sources: [BT] Ouyang et al. 2022, arXiv 2203.02155, eq. 1; [MARGIN] Touvron et al. 2023, arXiv 2307.09288, eq. 2;
[CENTRE] Eisenstein et al. 2023, arXiv 2312.09244; [TOKENS] Cobbe et al. 2021, arXiv 2110.14168, section 4.3 (a verifier
that predicts its last answer at every token); [DPO] Rafailov et al. 2023, arXiv 2305.18290, eq. 7; [cDPO] Mitchell
2023, "A note on DPO with noisy preferences"; [IPO] Azar et al. 2023, arXiv 2310.12036, eq. 17; [LN] Meng et al. 2024,
arXiv 2405.14734, section 4.2 (length-normalised DPO).
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_spmd.algorithms.advantages import Sums

# ---- reward models --------------------------------------------------------------------------------------------------


def bradley_terry_loss(
    chosen_scores_B: Tensor,
    rejected_scores_B: Tensor,
    chosen_mask_BG: Tensor,
    margins_B: Tensor,
    rejected_mask_BG: Tensor | None = None,
    chosen_values_BG1: Tensor | None = None,
    rejected_values_BG1: Tensor | None = None,
    *,
    centering_coef: float = 0.0,
    foresight_coef: float = 0.0,
) -> tuple[Tensor, Sums]:
    """Returns -log sigmoid(chosen - rejected - margin) ([BT], [MARGIN]) + centering_coef (chosen + rejected)^2
    ([CENTRE]) + foresight_coef times the `foresight` of both responses ([TOKENS]), summed over pairs, and sums for the
    log.

    values_BG1: the model's output before each response token, and after the last one; only foresight reads them, and
        the mask of the rejected response.
    """
    real_B = chosen_mask_BG.any(1)
    difference_B = chosen_scores_B - rejected_scores_B
    loss_B = -F.logsigmoid(difference_B - margins_B)
    loss_B = loss_B + centering_coef * (chosen_scores_B + rejected_scores_B).square()
    if foresight_coef:
        assert chosen_values_BG1 is not None and rejected_values_BG1 is not None and rejected_mask_BG is not None
        both_B = foresight(chosen_values_BG1, chosen_scores_B, chosen_mask_BG)
        both_B = both_B + foresight(rejected_values_BG1, rejected_scores_B, rejected_mask_BG)
        loss_B = loss_B + foresight_coef * both_B
    loss_sum, num_pairs = torch.where(real_B, loss_B, 0.0).sum(), real_B.sum().double()
    scores_2B = torch.stack((chosen_scores_B, rejected_scores_B)).detach().double()
    sums: Sums = {
        "loss": (loss_sum.detach().double(), num_pairs),
        "accuracy": (_right(difference_B, real_B), num_pairs),
        "margin": (_sum(difference_B, real_B), num_pairs),
        "score_mean": (torch.where(real_B, scores_2B, 0.0).sum(), 2 * num_pairs),
        "score_min": (torch.where(real_B, scores_2B, math.inf).amin(), num_pairs),
        "score_max": (torch.where(real_B, scores_2B, -math.inf).amax(), num_pairs),
    }
    return loss_sum, sums


def foresight(values_BG1: Tensor, scores_B: Tensor, mask_BG: Tensor) -> Tensor:
    """Returns the mean over the tokens of a response of (value before the token - its score)^2, [B]. The score is the
    target alone, without gradient."""
    error_BG = torch.where(mask_BG, values_BG1[:, :-1] - scores_B.detach()[:, None], 0.0)
    return error_BG.square().sum(1) / mask_BG.sum(1).clamp(min=1)


# ---- direct preference optimization ---------------------------------------------------------------------------------


def direct_preference_loss(
    chosen_logprobs_BG: Tensor,
    rejected_logprobs_BG: Tensor,
    chosen_mask_BG: Tensor,
    rejected_mask_BG: Tensor,
    ref_chosen_logprobs_BG: Tensor,
    ref_rejected_logprobs_BG: Tensor,
    *,
    loss: Literal["sigmoid", "ipo"] = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    per_token: bool = False,
) -> tuple[Tensor, Sums]:
    """Returns the loss of each pair, summed, and sums for the log. With d the log-ratio of the chosen response to the
    reference, less that of the rejected one,

        sigmoid   -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d),   e = label_smoothing ([DPO], [cDPO])
        ipo       (d - 1 / (2 beta))^2 ([IPO])

    A log-ratio is a sum over the response's tokens, or with per_token their mean ([LN]). Rewards in the log are beta
    times the sums.
    """
    real_B = chosen_mask_BG.any(1) & rejected_mask_BG.any(1)
    chosen_B = torch.where(chosen_mask_BG, chosen_logprobs_BG - ref_chosen_logprobs_BG, 0.0).sum(1)
    rejected_B = torch.where(rejected_mask_BG, rejected_logprobs_BG - ref_rejected_logprobs_BG, 0.0).sum(1)
    d_B = chosen_B - rejected_B
    if per_token:
        lengths = (mask_BG.sum(1).clamp(min=1) for mask_BG in (chosen_mask_BG, rejected_mask_BG))
        d_B = chosen_B / next(lengths) - rejected_B / next(lengths)
    if loss == "ipo":
        loss_B = (d_B - 1.0 / (2.0 * beta)).square()
    else:
        loss_B = -(1.0 - label_smoothing) * F.logsigmoid(beta * d_B) - label_smoothing * F.logsigmoid(-beta * d_B)
    loss_sum, num_pairs = torch.where(real_B, loss_B, 0.0).sum(), real_B.sum().double()
    logprobs = (
        torch.where(mask_BG, logprobs_BG, 0.0).sum(1)
        for mask_BG, logprobs_BG in ((chosen_mask_BG, chosen_logprobs_BG), (rejected_mask_BG, rejected_logprobs_BG))
    )
    sums: Sums = {
        "loss": (loss_sum.detach().double(), num_pairs),
        "accuracy": (_right(chosen_B - rejected_B, real_B), num_pairs),
        "margin": (beta * _sum(chosen_B - rejected_B, real_B), num_pairs),
        "chosen_reward": (beta * _sum(chosen_B, real_B), num_pairs),
        "rejected_reward": (beta * _sum(rejected_B, real_B), num_pairs),
        "chosen_logprob": (_sum(next(logprobs), real_B), num_pairs),
        "rejected_logprob": (_sum(next(logprobs), real_B), num_pairs),
    }
    return loss_sum, sums


def _right(difference_B: Tensor, real_B: Tensor) -> Tensor:
    """Counts the pairs whose chosen response is better; equal ones, such as all before training, count half."""
    return _sum((difference_B > 0).double() + 0.5 * (difference_B == 0).double(), real_B)


def _sum(x_B: Tensor, real_B: Tensor) -> Tensor:
    """Returns the sum and the number of real rows, for the log."""
    return torch.where(real_B, x_B.detach().double(), 0.0).sum()
