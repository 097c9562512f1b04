"""What the loss of a global mini-batch is divided by: counts, which are 0 or at least 1, or the sum of a key."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rlhf_spmd.algorithms.masks import response_mask
from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.workflow import DIVISORS, Call


def divisor_of(call: Call, rows: Mapping[str, Tensor]) -> Tensor:
    """The divisor of the loss of these rows, float64: response tokens, responses that have tokens, rows, or the sum of
    the numbers of a key. rows: data key -> [B, ...]."""
    if call.divisor not in DIVISORS:
        return rows[call.divisor].double().sum()
    masks = [response_mask(rows[key]) for key in call.responses]
    if call.divisor == "rows":
        return masks[0].new_tensor(len(masks[0]), dtype=torch.float64)
    counts = [mask.any(1).sum() if call.divisor == "responses" else mask.sum() for mask in masks]
    return sum(counts).double()


def checked_divisor(divisor: float, call: Call, page: str) -> float:
    """The divisor of a global mini-batch, positive, or 0 where there is no row. Raises UserError for a sum by which a
    loss cannot be divided. page: the algorithm's name."""
    if 0 <= divisor < math.inf:
        return divisor
    raise UserError(
        f"algorithm {page}: {call.name} divides the loss of a mini-batch by the sum of {call.divisor}, which is "
        f"{divisor:g}; give rows numbers of at least 0 (the mini-batch is left out where all are 0), or the call "
        "another divisor"
    )
