"""The losses of pairs, of which the chosen response is to be better than the rejected one.

Pure functions that return a *sum* over pairs, and sums for the log; the caller divides by the pairs of the global
mini-batch, so results do not depend on ranks or micro-batches.

Legend: B pairs, G response tokens; mask_BG bool, True on response tokens; elsewhere other [B, G] tensors may hold
anything, even NaN. A pair without tokens fills up a micro-batch and counts nothing.

Sources: [BT] Ouyang et al. 2022, arXiv 2203.02155, eq. 1; [MARGIN] Touvron et al. 2023, arXiv 2307.09288, eq. 2;
[CENTRE] Eisenstein et al. 2023, arXiv 2312.09244; [TOKENS] Cobbe et al. 2021, arXiv 2110.14168, section 4.3 (a verifier
that predicts its last answer at every token); [DPO] Rafailov et al. 2023, arXiv 2305.18290, eq. 7; [cDPO] Mitchell
2023, "A note on DPO with noisy preferences"; [IPO] Azar et al. 2023, arXiv 2310.12036, eq. 17; [LN] Meng et al. 2024,
arXiv 2405.14734, section 4.2 (length-normalised DPO), [SimPO] eq. 6; [ROBUST] Chowdhury et al. 2024, arXiv 2403.00409,
eq. 12; [HINGE] Zhao et al. 2023, arXiv 2305.10425; [APO] D'Oosterlinck et al. 2024, arXiv 2408.06266, section 3; [RPO]
Pang et al. 2024, arXiv 2404.19733, eq. 1; [ORPO] Hong et al. 2024, arXiv 2403.07691, eq. 6.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_spmd.algorithms.advantages import Sums
from rlhf_spmd.algorithms.page import Loss

CERTAIN = -1e-6  # the largest mean logprob of which odds are taken

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
    ref_chosen_logprobs_BG: Tensor | None = None,
    ref_rejected_logprobs_BG: Tensor | None = None,
    *,
    loss: Loss = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    per_token: bool = False,
    nll_coef: float = 0.0,
    target_margin: float = 0.0,
) -> tuple[Tensor, Sums]:
    """Returns the loss of each pair, summed, and sums for the log. With c and r the log-ratios of the chosen and of the
    rejected response to the reference, d = c - r and e = label_smoothing,

        sigmoid   -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d) ([DPO], [cDPO])
        robust    (-(1 - e) log sigmoid(beta d) + e log sigmoid(-beta d)) / (1 - 2 e) ([ROBUST])
        ipo       (d - 1 / (2 beta))^2 ([IPO])
        hinge     max(0, 1 - beta d) ([HINGE])
        apo_zero  1 - sigmoid(beta c) + sigmoid(beta r) ([APO])
        apo_down  sigmoid(beta c) + 1 - sigmoid(beta d) ([APO])

    A log-ratio is a sum over the response's tokens, or with per_token their mean ([LN]). Without a reference c and r
    are means of logprobs:

        simpo     -log sigmoid(beta d - target_margin) ([SimPO])
        orpo      -beta log sigmoid(odds(c) - odds(r)), odds(x) = x - log(1 - exp(x)) ([ORPO])

    To each nll_coef times -the mean logprob of the chosen response is added ([RPO]). Rewards in the log are beta times
    the sums, of the last two the means.
    """
    masks = (chosen_mask_BG, rejected_mask_BG)
    given = ((chosen_logprobs_BG, ref_chosen_logprobs_BG), (rejected_logprobs_BG, ref_rejected_logprobs_BG))
    real_B, lengths = chosen_mask_BG.any(1) & rejected_mask_BG.any(1), [one.sum(1).clamp(min=1) for one in masks]
    logprobs = [torch.where(mask_BG, own, 0.0).sum(1) for mask_BG, (own, _) in zip(masks, given, strict=True)]
    if loss in ("simpo", "orpo"):
        chosen_B, rejected_B = rewards = [one / length_B for one, length_B in zip(logprobs, lengths, strict=True)]
    else:
        rewards = [
            torch.where(mask_BG, own - reference, 0.0).sum(1)
            for mask_BG, (own, reference) in zip(masks, given, strict=True)
        ]
        of = lengths if per_token else (1.0, 1.0)
        chosen_B, rejected_B = (one / length_B for one, length_B in zip(rewards, of, strict=True))
    loss_B = _of_pairs(loss, chosen_B, rejected_B, beta, label_smoothing, target_margin)
    loss_B = loss_B - nll_coef * logprobs[0] / lengths[0]
    loss_sum, num_pairs = torch.where(real_B, loss_B, 0.0).sum(), real_B.sum().double()
    sums: Sums = {
        "loss": (loss_sum.detach().double(), num_pairs),
        "accuracy": (_right(rewards[0] - rewards[1], real_B), num_pairs),
        "margin": (beta * _sum(rewards[0] - rewards[1], real_B), num_pairs),
        "chosen_reward": (beta * _sum(rewards[0], real_B), num_pairs),
        "rejected_reward": (beta * _sum(rewards[1], real_B), num_pairs),
        "chosen_logprob": (_sum(logprobs[0], real_B), num_pairs),
        "rejected_logprob": (_sum(logprobs[1], real_B), num_pairs),
    }
    return loss_sum, sums


def _of_pairs(
    loss: Loss, chosen_B: Tensor, rejected_B: Tensor, beta: float, label_smoothing: float, target_margin: float
) -> Tensor:
    """Returns the loss of each pair, as `direct_preference_loss` defines it, without the likelihood."""
    scaled_B, e = beta * (chosen_B - rejected_B), label_smoothing
    if loss == "ipo":
        return (chosen_B - rejected_B - 1.0 / (2.0 * beta)).square()
    if loss == "hinge":
        return torch.relu(1.0 - scaled_B)
    if loss == "apo_zero":
        return torch.sigmoid(-beta * chosen_B) + torch.sigmoid(beta * rejected_B)
    if loss == "apo_down":
        return torch.sigmoid(beta * chosen_B) + torch.sigmoid(-scaled_B)
    if loss == "simpo":
        return -F.logsigmoid(scaled_B - target_margin)
    if loss == "orpo":
        chosen_B, rejected_B = (x - torch.log(-torch.expm1(x.clamp(max=CERTAIN))) for x in (chosen_B, rejected_B))
        return -beta * F.logsigmoid(chosen_B - rejected_B)
    right_B, wrong_B = F.logsigmoid(scaled_B), F.logsigmoid(-scaled_B)
    if loss == "robust":
        return (-(1.0 - e) * right_B + e * wrong_B) / (1.0 - 2.0 * e)
    return -(1.0 - e) * right_B - e * wrong_B


def _right(difference_B: Tensor, real_B: Tensor) -> Tensor:
    """Counts the pairs whose chosen response is better; equal ones, such as all before training, count half."""
    return _sum((difference_B > 0).double() + 0.5 * (difference_B == 0).double(), real_B)


def _sum(x_B: Tensor, real_B: Tensor) -> Tensor:
    """Returns the sum and the number of real rows, for the log."""
    return torch.where(real_B, x_B.detach().double(), 0.0).sum()
