"""sample() for a CPU, in torch and numpy: no row is sorted, and work as wide as a row stays in the cache.

Unrestricted rows need the masses of their blocks and the tokens of one block. For restricted rows only the largest
logits are listed, which is enough unless a nucleus is very wide; then the threshold is computed by sorting.

Legend: B sequences, R some of them, V vocabulary, N blocks of it, K tokens of a block, C listed tokens, L levels.
"""

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.kernels import cpu
from rlhf_spmd.kernels.cdf_tree import BLOCK, LEVELS_INSIDE, descend, descend_listed, level_numbers, levels_over
from rlhf_spmd.kernels.support import (
    Rules,
    Sampled,
    first_candidates,
    in_order,
    largest,
    support_minimum,
    support_sizes,
)

CHUNK = 2**17  # logits processed at a time: their float32 copy stays in a core's cache
LOWEST = torch.finfo(torch.float32).min


def sample_cpu(
    logits_BV: Tensor, bits_B: Tensor, rules: Rules, num_stored: int, any_restricted: bool = True
) -> Sampled:
    """Draws a token per row on a CPU.

    any_restricted: whether any row may be restricted.
    """
    if len(logits_BV) == 0:
        return empty(logits_BV, rules, num_stored)
    if not any_restricted:
        return _draw_open(logits_BV, bits_B, rules)
    restricted_B = rules.restricted(logits_BV.shape[1])
    if num_stored or restricted_B.all():
        return _draw_restricted(logits_BV, bits_B, rules, num_stored)
    if not restricted_B.any():
        return _draw_open(logits_BV, bits_B, rules)
    rows_R, open_R = restricted_B.nonzero()[:, 0], (~restricted_B).nonzero()[:, 0]
    sampled = empty(logits_BV, rules, num_stored)
    sampled.put(rows_R, _draw_restricted(logits_BV[rows_R], bits_B[rows_R], rules.rows(rows_R), num_stored))
    sampled.put(open_R, _draw_open(logits_BV[open_R], bits_B[open_R], rules.rows(open_R)))
    return sampled


def empty(logits_BV: Tensor, rules: Rules, num_stored: int) -> Sampled:
    num_rows, device = len(logits_BV), logits_BV.device
    tokens_B = torch.zeros(num_rows, dtype=torch.int64, device=device)
    numbers = (torch.empty_like(rules.temperature_B) for _ in range(3))
    support_BK = torch.full((num_rows, num_stored), -1, dtype=torch.int32, device=device) if num_stored else None
    return Sampled(tokens_B, *numbers, support_BK)


def block_masses(
    logits_BV: Tensor, temperature_B: Tensor, *, offset: int = 0, least_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns max z [B], and the mass of each block relative to it, float64 [B, N]. Only tokens with z >= least_B
    count.

    offset: of the first logit in its block.
    """
    num_rows, width = logits_BV.shape
    if cpu.used_for(logits_BV) and width:
        return cpu.block_masses(logits_BV, temperature_B, BLOCK, offset=offset, least_B=least_B)
    num_blocks = -(-(offset + width) // BLOCK)
    if not width:  # a slice of the vocabulary without known tokens
        return torch.full_like(temperature_B, -torch.inf), temperature_B.new_zeros(num_rows, num_blocks).double()
    max_B = torch.empty_like(temperature_B)
    masses_BN = max_B.new_empty(num_rows, num_blocks)
    scaled = bool((temperature_B != 1).any())
    chunk = max(1, CHUNK // (num_blocks * BLOCK)) if max_B.device.type == "cpu" else num_rows
    padded = offset or width % BLOCK  # padding has no mass
    whole_RNK = (max_B.new_zeros if padded else max_B.new_empty)(min(chunk, num_rows), num_blocks, BLOCK)
    for start in range(0, num_rows, chunk):
        rows = slice(start, min(start + chunk, num_rows))
        whole_RNK = whole_RNK[: rows.stop - start]
        z_RV = whole_RNK.flatten(1)[:, offset : offset + width].copy_(logits_BV[rows])
        if scaled:
            z_RV.div_(temperature_B[rows, None])
        torch.amax(z_RV, dim=1, out=max_B[rows])
        if least_B is not None:
            z_RV.masked_fill_(z_RV < least_B[rows, None], -torch.inf)
        z_RV.sub_(max_B[rows, None].clamp(min=LOWEST)).exp_()  # a slice that is all -inf has masses of 0
        torch.sum(whole_RNK, dim=2, out=masses_BN[rows])
    return max_B, masses_BN.double()


def _draw_open(
    logits_BV: Tensor, bits_B: Tensor, rules: Rules, least_B: Tensor | None = None, total_B: Tensor | None = None
) -> Sampled:
    """Draws from unrestricted rows, or from all z >= least_B, with total_B the mass of the whole vocabulary."""
    vocab_size, device = logits_BV.shape[1], logits_BV.device
    max_B, masses_BN = block_masses(logits_BV, rules.temperature_B, least_B=least_B)
    over = levels_over(vocab_size)
    numbers_BL = level_numbers(bits_B.cpu().numpy(), over + LEVELS_INSIDE)
    blocks_B = torch.from_numpy(descend(masses_BN.cpu().numpy(), numbers_BL[:, :over])).to(device)
    z_BK = _block_logits(logits_BV, blocks_B).to(max_B.dtype).div_(rules.temperature_B[:, None])
    if least_B is not None:
        z_BK.masked_fill_(z_BK < least_B[:, None], -torch.inf)
    return draw_inside(z_BK, max_B, blocks_B, numbers_BL[:, over:], masses_BN.sum(1), total_B, vocab_size)


def _block_logits(logits_BV: Tensor, blocks_B: Tensor) -> Tensor:
    """Returns the logits of one block of each row [B, K], -inf beyond the vocabulary."""
    vocab_size, device = logits_BV.shape[1], logits_BV.device
    if vocab_size % BLOCK == 0:
        return logits_BV.unflatten(1, (-1, BLOCK))[torch.arange(len(blocks_B), device=device), blocks_B]
    ids_BK = blocks_B[:, None] * BLOCK + torch.arange(BLOCK, device=device)
    x_BK = logits_BV.gather(1, ids_BK.clamp(max=vocab_size - 1))
    return x_BK.masked_fill_(ids_BK >= vocab_size, -torch.inf)


def draw_inside(
    z_BK: Tensor,
    max_B: Tensor,
    blocks_B: Tensor,
    numbers_BL: np.ndarray,
    support_mass_B: Tensor,
    total_B: Tensor | None,
    vocab_size: int,
) -> Sampled:
    """Draws a token of the chosen block.

    z_BK: -inf outside the support; overwritten.
    support_mass_B, total_B: mass of all blocks.
    """
    shifted_BK = z_BK.sub_(max_B[:, None])
    inside_B = descend(shifted_BK.exp().cpu().numpy(), numbers_BL)
    inside_B1 = torch.from_numpy(inside_B).to(z_BK.device)[:, None]
    tokens_B = (blocks_B * BLOCK + inside_B1[:, 0]).clamp_(max=vocab_size - 1)  # a row of NaN may end in the padding
    return _result(tokens_B, shifted_BK.gather(1, inside_B1)[:, 0], support_mass_B, total_B)


def _result(tokens_B: Tensor, shifted_B: Tensor, mass_B: Tensor, total_B: Tensor | None) -> Sampled:
    """Returns the result of drawing.

    shifted_B: z - max z of the tokens.
    mass_B: of the support.
    total_B: of the vocabulary (None: the same).
    """
    if total_B is None:
        logprobs_B = (shifted_B - mass_B.log()).to(shifted_B.dtype)
        return Sampled(tokens_B, logprobs_B, logprobs_B, logprobs_B * 0 + 1)  # 1 or NaN
    logprobs_B = torch.where(mass_B > 0, shifted_B.double() - mass_B.log(), torch.nan)
    numbers = torch.stack((logprobs_B, shifted_B - total_B.log(), mass_B / total_B))
    return Sampled(tokens_B, *numbers.masked_fill(~(total_B > 0), torch.nan).to(shifted_B.dtype).unbind())


def draw_listed(
    z_BC: Tensor,
    ids_BC: Tensor,
    below_B: Tensor | None,
    max_B: Tensor,
    total_B: Tensor,
    bits_B: Tensor,
    rules: Rules,
    vocab_size: int,
    num_stored: int,
) -> tuple[Sampled, Tensor]:
    """Draws from the sorted largest logits of each row; for below_B and the second result see support_sizes."""
    shifted_BC = z_BC - max_B[:, None]
    masses_BC = shifted_BC.double().exp()
    counts_B, certain_B = support_sizes(z_BC, masses_BC, total_B, below_B, rules)
    dropped_BC = torch.arange(z_BC.shape[1], device=z_BC.device) >= counts_B[:, None]
    masses_BC.masked_fill_(dropped_BC, 0.0)
    numbers_BL = level_numbers(bits_B.cpu().numpy(), levels_over(vocab_size) + LEVELS_INSIDE)
    tokens = descend_listed(ids_BC.cpu().numpy(), masses_BC.cpu().numpy(), numbers_BL)
    tokens_B = torch.from_numpy(tokens).to(z_BC.device).clamp_(max=vocab_size - 1)
    shifted_B = torch.where(ids_BC == tokens_B[:, None], shifted_BC, 0.0).sum(1)
    sampled = _result(tokens_B, shifted_B, masses_BC.sum(1), total_B)
    if num_stored:
        support_BC = ids_BC.masked_fill(dropped_BC, -1)[:, :num_stored].int()
        support_BK = torch.nn.functional.pad(support_BC, (0, num_stored - support_BC.shape[1]), value=-1)
        sampled = sampled._replace(support_BK=support_BK)
    return sampled, certain_B


def _draw_restricted(logits_BV: Tensor, bits_B: Tensor, rules: Rules, num_stored: int) -> Sampled:
    """Draws from restricted rows."""
    vocab_size = logits_BV.shape[1]
    max_B, masses_BN = block_masses(logits_BV, rules.temperature_B)
    total_B = masses_BN.sum(1)
    num = first_candidates(rules, vocab_size, num_stored)

    def listed(rows, num: int) -> tuple[Sampled, Tensor]:
        values_RC, ids_RC = largest(logits_BV[rows], num)
        mine = rules.rows(rows)
        z_RC = values_RC / mine.temperature_B[:, None]
        if num_stored or (mine.limit_B < vocab_size).any():
            z_RC, ids_RC = in_order(z_RC, ids_RC)
        below_R = z_RC[:, -1] if num < vocab_size else None
        rest = (max_B[rows], total_B[rows], bits_B[rows], mine, vocab_size, num_stored)
        return draw_listed(z_RC, ids_RC, below_R, *rest)

    sampled, certain_B = listed(slice(None), num)
    if certain_B.all():
        return sampled
    limited_B = (rules.limit_B < vocab_size) | (num_stored > 0)
    many_R = (~certain_B & limited_B).nonzero()[:, 0]  # ties at the edge are cut by id
    if len(many_R):
        sampled.put(many_R, listed(many_R, vocab_size)[0])
    wide_R = (~certain_B & ~limited_B).nonzero()[:, 0]
    if len(wide_R):
        wide_RV, mine = logits_BV[wide_R], rules.rows(wide_R)
        least_R = support_minimum(wide_RV / mine.temperature_B[:, None], total_B[wide_R], mine)
        sampled.put(wide_R, _draw_open(wide_RV, bits_B[wide_R], mine, least_R, total_B[wide_R]))
    return sampled
