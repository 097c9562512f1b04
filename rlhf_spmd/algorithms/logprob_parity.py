"""Compares the logprobs of generation and of training: two passes over the same tokens with the same weights."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Parity:
    """Differences between the generator's logprobs and the teacher-forced ones.

    row, position: of the largest (row -1: there is no token).
    """

    num_tokens: int
    sum_abs: float  # nats, over all tokens: add over ranks, divide by the tokens
    max_abs: float  # nats; infinite if a logprob is not a number
    row: int
    position: int

    @property
    def mean_abs(self) -> float:
        return self.sum_abs / max(self.num_tokens, 1)


def parity(generated_BG: Tensor, forced_BG: Tensor, mask_BG: Tensor) -> Parity:
    """Compares two passes' logprobs of the same tokens; the caller sets the tolerance."""
    difference_BG = (generated_BG.double() - forced_BG.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    difference_BG = torch.where(mask_BG, difference_BG, -1.0)
    if not mask_BG.any():
        return Parity(num_tokens=0, sum_abs=0.0, max_abs=0.0, row=-1, position=-1)
    row, position = divmod(int(difference_BG.argmax()), mask_BG.shape[1])
    worst = float(difference_BG[row, position])
    return Parity(int(mask_BG.sum()), float(difference_BG[mask_BG].sum()), worst, row, position)
