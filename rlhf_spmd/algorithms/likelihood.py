"""The loss of supervised training: minus the log-likelihood of responses that the data set has.

A pure function that returns a *sum*, and sums for the log; the caller divides by the learned tokens of the global
mini-batch, so results do not depend on ranks or micro-batches.

Legend: B sequences, G response tokens; mask_BG bool, True on response tokens; elsewhere other [B, G] tensors may hold
anything, even NaN.
"""

import torch
from torch import Tensor

from rlhf_spmd.algorithms.advantages import Sums


def likelihood_loss(
    logprobs_BG: Tensor,
    most_likely_BG: Tensor,
    mask_BG: Tensor,
    trained_BG: Tensor,
    entropy_BG: Tensor | None = None,
) -> tuple[Tensor, Sums]:
    """Returns -sum of the logprobs of the tokens where trained_BG is 1, and sums for the log.

    trained_BG: 1, or 0 for the tokens of other turns of a conversation.
    most_likely_BG: whether no other token was more likely.
    """
    used_BG = mask_BG & (trained_BG > 0)
    loss_sum = -torch.where(used_BG, logprobs_BG, 0.0).sum()
    num_tokens, num_rows = used_BG.sum().double(), mask_BG.any(1).sum().double()
    sums: Sums = {
        "loss": (loss_sum.detach().double(), num_tokens),
        "token_accuracy": ((most_likely_BG & used_BG).sum().double(), num_tokens),
        "trained_tokens": (num_tokens, num_rows),
    }
    if entropy_BG is not None:
        sums["entropy"] = torch.where(used_BG, entropy_BG, 0.0).detach().double().sum(), num_tokens
    return loss_sum, sums
