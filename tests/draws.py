"""Random bits for tests that draw tokens."""

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.kernels.philox import random_bits


def random_rows(num_rows: int, seed: int = 0) -> Tensor:
    """Draws bits for one token per row: int64 [B]."""
    return random_responses(num_rows, 1, seed)[:, 0]


def random_responses(num_rows: int, num_positions: int, seed: int = 0) -> Tensor:
    """Draws bits for whole responses: int64 [B, G]."""
    bits_BG = random_bits(seed, 0, 0, np.arange(num_rows), np.zeros(num_rows, int), num_positions)
    return torch.from_numpy(bits_BG)


def bits_of(top_B, below_B=0) -> Tensor:
    """Returns random bits with a given number for the top level, in [0, 1), and a given word for all other levels."""
    top_B = (torch.as_tensor(top_B, dtype=torch.float64) * 2**32).long()
    assert ((top_B >= 0) & (top_B < 2**32)).all()
    return top_B | torch.as_tensor(below_B) << 32
