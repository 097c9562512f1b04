"""What the loss of a global mini-batch is divided by: counts, which are 0 or at least 1, or the sum of a key."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.workflow import DIVISORS, LossCall
from rlhf_spmd.runtime.execute.iteration import mask_of

CANCELLED = 1e-6  # times the sum of their sizes: a smaller sum of numbers is what rounding leaves of them


def divisor_of(call: LossCall, rows: Mapping[str, Tensor]) -> Tensor:
    """Returns the divisor of the loss of these rows, float64 [1]: response tokens, responses that have tokens, or rows;
    or [2]: the sum of the numbers of a key, and that of their sizes.

    rows: data key -> [B, ...].
    """
    if call.divisor not in DIVISORS:
        numbers = rows[call.divisor].double()
        return torch.stack([numbers.sum(), numbers.abs().sum()])
    masks = [mask_of(rows, key) for key in call.responses]
    if call.divisor == "rows":
        return masks[0].new_tensor([len(masks[0])], dtype=torch.float64)
    counts = [mask.any(1).sum() if call.divisor == "responses" else mask.sum() for mask in masks]
    return torch.stack(counts).sum().double()[None]


def checked_divisor(found: Sequence[float], call: LossCall, page: str) -> float:
    """Returns the divisor of a global mini-batch, positive, or 0 where there is no row. Raises UserError for a sum by
    which a loss cannot be divided, also for one of numbers that cancel each other.

    found: of divisor_of, summed over ranks.
    page: the algorithm's name.
    """
    divisor, size = found[0], found[-1]
    if (divisor == 0 == size) or CANCELLED * size < divisor < math.inf:
        return divisor
    cancels = " because they cancel each other" if abs(divisor) <= CANCELLED * size < math.inf else ""
    raise UserError(
        f"algorithm {page}: {call.name} divides the loss of a mini-batch by the sum of {call.divisor}, which is "
        f"{divisor:g}{cancels}; give rows numbers of at least 0 (the mini-batch is left out where all are 0), or the "
        "call another divisor"
    )
