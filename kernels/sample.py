"""Draw a token from logits with one given uniform number: inverse CDF over fixed blocks of the vocabulary.

    p_v = exp(z_v - max z) / sum,   z = logits / temperature,   token = the first v with  p_0 + ... + p_v > u

The sum is taken in two levels: the mass of each block of BLOCK tokens, a float64 running sum over the blocks that
finds the block, then a float64 running sum inside that one block. The blocks are fixed, so whoever owns a shard of
the vocabulary computes the same block masses, and the token does not depend on tensor parallelism; and only one block
per row is scanned.

The inequality is strict and the target stays strictly below the total, so a token of zero probability (a banned one,
whose logit is -inf, included) is never drawn, whatever the rounding.

Legend: B sequences, V vocabulary, N vocabulary blocks, K tokens of one block.
"""

import torch
from torch import Tensor

BLOCK = 512  # part of the definition: another block size is another (equally good) order of sums
BELOW_ONE = 1.0 - 2.0**-53  # x * BELOW_ONE < x for every positive float64 x


@torch.no_grad()
def sample_ref(logits_BV: Tensor, uniforms_B, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B] and their logprobs [B] under softmax(logits / temperature); uniforms in [0, 1), tensor or numpy.

    Statistics are float32 (float64 for float64 logits). A row that holds NaN or +inf, or nothing but -inf, returns a
    token in range with logprob NaN: the caller's parity gate reports it.
    """
    assert temperature > 0, "temperature 0 is argmax, not sampling"
    num_rows, vocab_size = logits_BV.shape
    num_blocks = -(-vocab_size // BLOCK)
    scaled_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    if temperature != 1.0:
        scaled_BV = scaled_BV / temperature
    max_B1 = scaled_BV.amax(dim=1, keepdim=True)

    masses_BNK = scaled_BV.new_zeros(num_rows, num_blocks, BLOCK)
    torch.sub(scaled_BV, max_B1, out=masses_BNK.view(num_rows, num_blocks * BLOCK)[:, :vocab_size]).exp_()
    cdf_BN = masses_BNK.sum(dim=2).double().cumsum(dim=1)
    total_B1 = cdf_BN[:, -1:]
    share_B1 = torch.as_tensor(uniforms_B, device=logits_BV.device).double().clamp(0.0, BELOW_ONE)[:, None]
    block_B1, rest_B1 = _first_above(cdf_BN, share_B1 * total_B1)

    rows_B = torch.arange(num_rows, device=logits_BV.device)
    cdf_BK = masses_BNK[rows_B, block_B1[:, 0]].double().cumsum(dim=1)
    # The block's mass was summed in another order than cdf_BK: keep the target inside it.
    inside_B1, _ = _first_above(cdf_BK, torch.minimum(rest_B1, cdf_BK[:, -1:] * BELOW_ONE))
    tokens_B1 = block_B1 * BLOCK + inside_B1
    logprobs_B1 = (scaled_BV.gather(1, tokens_B1) - max_B1).double() - total_B1.log()
    return tokens_B1[:, 0], logprobs_B1[:, 0].to(scaled_BV.dtype)


@torch.no_grad()
def edge_distances(logits_BV: Tensor, uniforms_B: Tensor, tokens_B: Tensor, temperature: float = 1.0) -> Tensor:
    """How far each uniform lies inside the interval of the CDF that draws its token: float64 [B], negative if outside.

    Logits that differ by rounding move the edges by about 1e-7, so only a token with a smaller distance may flip.
    """
    probs_BV = (logits_BV.double() / temperature).softmax(dim=1)
    above_B1 = probs_BV.cumsum(dim=1).gather(1, tokens_B[:, None])
    below_B1 = above_B1 - probs_BV.gather(1, tokens_B[:, None])
    uniforms_B1 = uniforms_B.double()[:, None]
    return torch.minimum(uniforms_B1 - below_B1, above_B1 - uniforms_B1)[:, 0]


@torch.no_grad()
def kept_tokens(
    logits_BV: Tensor, temperature: float = 1.0, *, top_k: int, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """The tokens that top-k, then top-p, then min-p leave to be drawn: ids int64 [B, min(top_k, V)], most likely first,
    -1 after the last.

    top-p keeps the smallest set of the most likely tokens whose mass (of what top-k left) reaches top_p (Holtzman et
    al., arXiv 1904.09751); min-p those of at least min_p times the largest probability (arXiv 2407.01082). The most
    likely token always stays, a banned one (-inf) never.
    """
    assert top_k > 0 and 0 < top_p <= 1 and 0 <= min_p <= 1
    scaled_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32)) / temperature
    scaled_BK, ids_BK = scaled_BV.topk(min(top_k, logits_BV.shape[1]))
    probs_BK = scaled_BK.softmax(dim=1)
    before_BK = probs_BK.cumsum(dim=1) - probs_BK
    keep_BK = (before_BK < top_p) & (probs_BK >= min_p * probs_BK[:, :1]) & (probs_BK > 0)
    keep_BK[:, 0] = True
    return ids_BK.masked_fill(~keep_BK, -1)


@torch.no_grad()
def restrict(logits_BV: Tensor, kept_BK: Tensor) -> Tensor:
    """The logits with every token outside the kept set made impossible."""
    restricted_BV = torch.full_like(logits_BV, -torch.inf)
    first_B1 = kept_BK[:, :1]  # stands in for the padding: it is always kept
    ids_BK = torch.where(kept_BK >= 0, kept_BK, first_B1)
    return restricted_BV.scatter_(1, ids_BK, logits_BV.gather(1, ids_BK))


def _first_above(cdf_BN: Tensor, target_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Index [B, 1] of the first entry above the target, and the rest of the target there; index 0 if all is NaN."""
    index_B1 = (cdf_BN <= target_B1).sum(dim=1, keepdim=True)
    before_B1 = torch.where(index_B1 > 0, cdf_BN.gather(1, (index_B1 - 1).clamp(min=0)), 0.0)
    return index_B1, target_B1 - before_B1
