"""When two runs draw different tokens: the distance of the random number from the edge of the token's interval."""

import torch
from torch import Tensor

from rlhf_spmd.kernels.cdf_tree import FANOUT, LEVELS_INSIDE, level_uniforms, levels_over


@torch.no_grad()
def edge_distances(logits_BV: Tensor, bits_B: Tensor, tokens_B: Tensor, temperature: float = 1.0) -> Tensor:
    """Returns how close the random numbers came to drawing another token: float64 [B], negative if they do draw
    another.

    The smallest distance, over the levels, between a level's number and the edges of the chosen child's interval, both
    in [0, 1). Rounding errors in the logits move the edges by about 1e-7, so only a token with a smaller distance may
    flip.
    """
    num_rows, vocab_size = logits_BV.shape
    num_levels = levels_over(vocab_size) + LEVELS_INSIDE
    masses_BV = torch.nn.functional.pad(
        (logits_BV.double() / temperature).softmax(dim=1), (0, FANOUT**num_levels - vocab_size)
    )
    numbers_BL = level_uniforms(bits_B, num_levels)
    rows_B, nearest_B = torch.arange(num_rows), torch.full((num_rows,), torch.inf, dtype=torch.float64)
    for level in range(num_levels):
        leaves = FANOUT ** (num_levels - level - 1)  # below each child
        masses_BMF = masses_BV.view(num_rows, -1, FANOUT, leaves).sum(dim=3)
        path_B = tokens_B // leaves
        cdf_BF = masses_BMF[rows_B, path_B // FANOUT].cumsum(dim=1)
        cdf_BF = torch.nn.functional.pad(cdf_BF / cdf_BF[:, -1:], (1, 0))
        below_B, above_B = (cdf_BF[rows_B, path_B % FANOUT + i] for i in (0, 1))
        number_B = numbers_BL[:, level]
        # 0 and 1 do not border another token
        down_B = torch.where(below_B > 0, number_B - below_B, torch.inf)
        up_B = torch.where(above_B < 1 - 1e-15, above_B - number_B, torch.inf)
        nearest_B = torch.minimum(nearest_B, torch.minimum(down_B, up_B))
    return nearest_B
