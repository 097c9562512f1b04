"""Masks of dropout from counters: which inputs of a layer are dropped is a function of their place, not of the rank.

The bits of an input are one 16-bit lane of Philox4x32-10 (philox.py), computed by torch on the device of the input:

    key      seed (64 bits)
    counter  (feature // 8, position, row, site)
    lane     feature % 8 of the four words, low halves first

An input is dropped where its lane is below round(p * 2**16), so p is exact to 2**-17. Nothing is drawn in order and
nothing is kept: a backward pass makes the mask of the forward pass again, and a rank that holds some of the features or
of the rows makes its part of the whole mask.
"""

# N tokens, I inputs of a layer, or those of this rank

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_spmd.kernels.philox import MULTIPLIERS, NUM_ROUNDS, WEYL, WORD_MASK

LANE_BITS, NUM_LANES = 16, 8


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout of the inputs of layers in one pass.

    row_N, position_N: int64, which row a token is of and its place there, each in [0, 2**32).
    """

    seed: int
    rate: float
    row_N: Tensor
    position_N: Tensor

    @property
    def threshold(self) -> int:
        """Lanes below it are dropped."""
        return round(self.rate * 2**LANE_BITS)

    @property
    def scale(self) -> float:
        """What kept inputs are multiplied with, so that their mean stays: 1 / (1 - p)."""
        return 2**LANE_BITS / (2**LANE_BITS - self.threshold)

    def mask(self, features: range, site: int) -> Tensor:
        """Returns which inputs are dropped, bool [N, I]. features: their numbers in the layer; site: the layer."""
        first, end = features.start // NUM_LANES, -(-features.stop // NUM_LANES)
        block_I = torch.arange(first, end, device=self.row_N.device)
        words = philox_words(self.seed, [block_I, self.position_N[:, None], self.row_N[:, None], site])
        lanes = [half for word in words for half in (word & (2**LANE_BITS - 1), word >> LANE_BITS)]
        dropped_NI = torch.stack([lane < self.threshold for lane in lanes], dim=-1).flatten(-2)
        start = features.start - first * NUM_LANES
        return dropped_NI[:, start : start + len(features)]


def philox_words(seed: int, counter: Sequence[Tensor | int]) -> list[Tensor]:
    """Computes the four output words, int64 in [0, 2**32), as philox.philox_uint32 does.

    counter: four tensors or numbers of such words, which broadcast against each other.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & WORD_MASK, seed >> 32
    for _ in range(NUM_ROUNDS):
        (high0, low0), (high1, low1) = _halves(MULTIPLIERS[0] * c0), _halves(MULTIPLIERS[1] * c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & WORD_MASK, (k1 + WEYL[1]) & WORD_MASK
    return [*torch.broadcast_tensors(c0, c1, c2, c3)]


def _halves(product: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the high and the low 32 bits of a product modulo 2**64, which int64 holds as a negative number from 2**63
    on."""
    return (product >> 32) & WORD_MASK, product & WORD_MASK
