"""Inverse-CDF sampling down a tree over the vocabulary, with one random number per level.

The vocabulary is divided into blocks of BLOCK tokens; the blocks, and the tokens of a block, form nested groups of
FANOUT. From the top, each level picks one of FANOUT children by the inverse CDF of their masses,

    child = the first c with  m_0 + ... + m_c > u_l * (m_0 + ... + m_7)

Separate numbers per level make tokens robust to rounding errors in the logits. One CDF over V tokens has V edges, which
all move with the mass of a likely token, so a token flips with probability sum_v |d CDF_v|: about 50 times that of the
tree at V = 1,024 (bench/LOG.md).

The numbers come from the two words w of the token's random bits (philox.py),

    u_0 = 2**-32 w_0,    u_l = 2**-32 mix(w_1 ^ (l * 0x9E3779B9 mod 2**32))  for l > 0

where mix is the finalizer of MurmurHash3, a permutation of 32-bit words. Each number therefore takes each of its 2**32
values equally often, and u_0 is independent of the others. All other levels derive from w_1: over its 2**32 values,
a uniform distribution over 131,072 tokens is drawn with a total variation distance of 0.11%
(tests/unit/kernels/test_cdf_tree.py).

The inequality is strict and the target stays strictly below the total, so a token of zero probability is never drawn,
regardless of rounding. Numbers and cumulated masses are float64.

Legend: B sequences, V vocabulary, N leaves, L levels, F children of a node, C listed tokens.
"""

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.kernels.triton_import import tl, triton

FANOUT = 8  # like BLOCK part of the definition: another tree draws other (equally valid) tokens
BLOCK = FANOUT**3
WORD_MASK = 0xFFFFFFFF


def depth(num_leaves: int) -> int:
    """Returns the levels of the smallest tree with at least `num_leaves` leaves."""
    levels = 0
    while FANOUT**levels < num_leaves:
        levels += 1
    return levels


def levels_over(vocab_size: int) -> int:
    """Returns the levels between the root and the blocks."""
    return depth(-(-vocab_size // BLOCK))


LEVELS_INSIDE = depth(BLOCK)  # between a block and its tokens


def level_uniforms(bits_B: Tensor, num_levels: int) -> Tensor:
    """Returns the number of each level, float64 [B, L] in [0, 1), from random bits int64 [B]."""
    assert bits_B.dtype == torch.int64, bits_B.dtype
    levels_L = torch.arange(num_levels, device=bits_B.device) * 0x9E3779B9 & WORD_MASK
    x_BL = (bits_B >> 32 & WORD_MASK)[:, None] ^ levels_L
    x_BL = ((x_BL ^ (x_BL >> 16)) * 0x85EBCA6B) & WORD_MASK
    x_BL = ((x_BL ^ (x_BL >> 13)) * 0xC2B2AE35) & WORD_MASK
    x_BL = x_BL ^ (x_BL >> 16)
    x_BL[:, :1] = (bits_B & WORD_MASK)[:, None]
    return x_BL.double() * 2.0**-32


def descend_ref(masses_BN: Tensor, numbers_BL: Tensor) -> Tensor:
    """Draws one of N leaves, int64 [B]; an arbitrary one if there are NaNs."""
    missing = FANOUT ** numbers_BL.shape[1] - masses_BN.shape[1]
    levels = [torch.nn.functional.pad(masses_BN.double(), (0, missing))]  # from the leaves up
    while levels[0].shape[1] > FANOUT:
        levels.insert(0, levels[0].unflatten(1, (-1, FANOUT)).sum(dim=2))
    children_1F = torch.arange(FANOUT, device=masses_BN.device)[None]
    index_B1 = torch.zeros(len(masses_BN), 1, dtype=torch.int64, device=masses_BN.device)
    for level in range(numbers_BL.shape[1]):
        index_B1 = index_B1 * FANOUT
        cdf_BF = levels[level].gather(1, index_B1 + children_1F).cumsum(dim=1)
        target_B1 = numbers_BL[:, level, None] * cdf_BF[:, -1:]
        index_B1 = index_B1 + (cdf_BF <= target_B1).sum(dim=1, keepdim=True).clamp(max=FANOUT - 1)
    return index_B1[:, 0]


# The same in numpy. On arrays this small, calls dominate a draw on a CPU, and numpy's cost a third of torch's.


def level_numbers(bits_B: np.ndarray, num_levels: int) -> np.ndarray:
    """Returns level_uniforms for an array."""
    assert bits_B.dtype == np.int64, bits_B.dtype
    levels_L = (np.arange(num_levels, dtype=np.uint64) * np.uint64(0x9E3779B9)).astype(np.uint32)
    x_LB = (bits_B >> 32).astype(np.uint32) ^ levels_L[:, None]
    x_LB = (x_LB ^ (x_LB >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x_LB = (x_LB ^ (x_LB >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    x_LB = x_LB ^ (x_LB >> np.uint32(16))
    x_LB[:1] = bits_B.astype(np.uint32)  # modulo 2**32
    return (x_LB * 2.0**-32).T


def _child(masses_BF: np.ndarray, number_B: np.ndarray) -> np.ndarray:
    cdf_BF = masses_BF.cumsum(axis=1, dtype=np.float64)
    passed_B = (cdf_BF <= number_B[:, None] * cdf_BF[:, -1:]).sum(axis=1)
    return np.minimum(passed_B, FANOUT - 1)


def descend(masses_BN: np.ndarray, numbers_BL: np.ndarray) -> np.ndarray:
    """Descends as descend_ref, for arrays; nodes are summed in the type of the masses."""
    num_rows, num_levels = numbers_BL.shape
    rows_B, index_B = np.arange(num_rows), np.zeros(num_rows, dtype=np.int64)
    left_BN = masses_BN
    if masses_BN.shape[1] < FANOUT**num_levels:
        left_BN = np.zeros((num_rows, FANOUT**num_levels), masses_BN.dtype)
        left_BN[:, : masses_BN.shape[1]] = masses_BN
    for level in range(num_levels):
        parts_BFN = left_BN.reshape(num_rows, FANOUT, -1)
        child_B = _child(parts_BFN.sum(axis=2), numbers_BL[:, level])
        index_B = index_B * FANOUT + child_B
        left_BN = parts_BFN[rows_B, child_B]
    return index_B


def descend_listed(ids_BC: np.ndarray, masses_BC: np.ndarray, numbers_BL: np.ndarray) -> np.ndarray:
    """Returns the draw of `descend` if only a few listed leaves have mass: ids [B, C] and their masses, 0 for excluded
    ones.

    One pass over the lists per level; no array is as wide as the tree.
    """
    num_rows, num_levels = numbers_BL.shape
    bins_B1 = np.arange(num_rows)[:, None] * (FANOUT + 1)
    index_B = np.zeros(num_rows, dtype=np.int64)
    weights = masses_BC.reshape(-1)
    for level in range(num_levels):
        child_BC = ids_BC // FANOUT ** (num_levels - level - 1) - index_B[:, None] * FANOUT
        child_BC = np.where((child_BC >= 0) & (child_BC < FANOUT), child_BC, FANOUT)  # the last bin: elsewhere
        sums = np.bincount((bins_B1 + child_BC).reshape(-1), weights, minlength=num_rows * (FANOUT + 1))
        index_B = index_B * FANOUT + _child(sums.reshape(num_rows, -1)[:, :FANOUT], numbers_BL[:, level])
    return index_B


# The same in Triton, on one row in registers.


@triton.jit
def level_number(bits, LEVEL: tl.constexpr):
    """Returns one of level_uniforms, float64, from a scalar."""
    if LEVEL == 0:
        x = bits.to(tl.uint64) & 0xFFFFFFFF
    else:
        x = bits.to(tl.uint64) >> 32  # 32 bits: products fit
        x = x ^ ((LEVEL * 0x9E3779B9) & 0xFFFFFFFF)
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
        x = x ^ (x >> 16)
    return x.to(tl.float64) * 2.3283064365386963e-10  # 2**-32


@triton.jit
def descend_row(masses_N, bits, FIRST: tl.constexpr, LEVELS: tl.constexpr):
    """Returns the leaf, int32, that descend_ref returns for masses float64 [8**LEVELS].

    FIRST: the level of the root.
    """
    children_F = tl.arange(0, 8)
    index = tl.full([], 0, tl.int32)
    left_N = masses_N
    for level in tl.static_range(LEVELS):
        parts_FN = tl.reshape(left_N, [8, 8 ** (LEVELS - 1 - level)])
        cdf_F = tl.cumsum(tl.sum(parts_FN, axis=1), 0)
        whole = tl.sum(tl.where(children_F == 7, cdf_F, 0.0), axis=0)
        target = level_number(bits, FIRST + level) * whole
        child = tl.minimum(tl.sum((cdf_F <= target).to(tl.int32), axis=0), 7)
        index = index * 8 + child
        left_N = tl.sum(tl.where(children_F[:, None] == child, parts_FN, 0.0), axis=0)
    return index
