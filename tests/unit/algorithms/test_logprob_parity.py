"""Whether generation and training agree on the tokens (row 12)."""

import math

import torch

from rlhf_spmd.algorithms.logprob_parity import Parity, parity

NAN = float("nan")


def tensor(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_row_12_parity():
    """The guard of generator logprobs: how far, on average and at worst, and where."""
    generated_BG = tensor([-1.0, -2.0, 0.0], [-3.0, -4.0, -5.0])
    forced_BG = tensor([-1.0, -2.5, 9.0], [-3.0, -4.0, -5.25])
    mask_BG = torch.tensor([[True, True, False], [True, True, True]])
    assert parity(generated_BG, forced_BG, mask_BG) == Parity(5, 0.75, 0.5, row=0, position=1)
    assert parity(generated_BG, forced_BG, mask_BG).mean_abs == 0.15
    forced_BG[1, 1] = NAN
    worst = parity(generated_BG, forced_BG, mask_BG)
    assert (worst.max_abs, worst.row, worst.position) == (math.inf, 1, 1)
    for mask in (torch.zeros_like(mask_BG), mask_BG[:0]):
        empty = parity(generated_BG[: len(mask)], forced_BG[: len(mask)], mask)
        assert (empty.num_tokens, empty.mean_abs, empty.max_abs, empty.row) == (0, 0.0, 0.0, -1)
