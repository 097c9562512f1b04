"""Draw a token from logits with one given uniform number: inverse CDF over fixed blocks of the vocabulary.

    p_v = exp(z_v - max z) / sum,   z = logits / temperature

The vocabulary is a tree of fixed shape: blocks of BLOCK tokens, and blocks as well as their tokens in nested groups of
FANOUT. From the top, each level picks one of FANOUT children by the inverse CDF of their masses,

    child = the first c with  m_0 + ... + m_c > u_l * (m_0 + ... + m_7),   u_0 = u,  u_l = hash(u, l)

where every level has a number of its own, made from the bits of u. That is what keeps tokens when logits change by
rounding: one CDF over V tokens has V edges, which all move when the mass of a likely token does, so a token flips with
probability sum_v |d CDF_v|, about 50 times that of the tree at V = 1,024 (bench/LOG.md). The blocks are fixed, so
whoever owns a shard of the vocabulary computes the same block masses, and the token does not depend on tensor
parallelism; and only one block per row is looked into.

The inequality is strict and the target stays strictly below the total, so a token of zero probability (a banned one,
whose logit is -inf, included) is never drawn, whatever the rounding.

Legend: B sequences, V vocabulary, N vocabulary blocks (or leaves), K tokens of a block, L levels, F children of a node.
"""

import torch
from torch import Tensor

FANOUT = 8  # part of the definition, as is BLOCK: another tree draws other (equally good) tokens
BLOCK = FANOUT**3
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
    masses_BN = masses_BNK.sum(dim=2).double()
    over, inside = _depth(num_blocks), _depth(BLOCK)
    numbers_BL = level_uniforms(torch.as_tensor(uniforms_B, device=logits_BV.device), over + inside)
    blocks_B = _descend(masses_BN, numbers_BL[:, :over])
    rows_B = torch.arange(num_rows, device=logits_BV.device)
    inside_B = _descend(masses_BNK[rows_B, blocks_B].double(), numbers_BL[:, over:])
    tokens_B = (blocks_B * BLOCK + inside_B).clamp(max=vocab_size - 1)  # a row of NaN may end in the padding
    logprobs_B = (scaled_BV[rows_B, tokens_B] - max_B1[:, 0]).double() - masses_BN.sum(dim=1).log()
    return tokens_B, logprobs_B.to(scaled_BV.dtype)


def _depth(num_leaves: int) -> int:
    """Levels of the smallest tree with so many leaves."""
    depth = 0
    while FANOUT**depth < num_leaves:
        depth += 1
    return depth


def level_uniforms(uniforms_B: Tensor, num_levels: int) -> Tensor:
    """The number of each level, float64 [B, L] in [0, 1): the given one at the top, below a hash (the finalizer of
    MurmurHash3) of its float32 bits and the level."""
    mask = 0xFFFFFFFF  # on 32-bit words, held in 64 bits
    levels_L = torch.arange(num_levels, device=uniforms_B.device) * 0x9E3779B9
    x_BL = (uniforms_B.float().view(torch.int32).long()[:, None] ^ levels_L) & mask
    x_BL = ((x_BL ^ (x_BL >> 16)) * 0x85EBCA6B) & mask
    x_BL = ((x_BL ^ (x_BL >> 13)) * 0xC2B2AE35) & mask
    numbers_BL = ((x_BL ^ (x_BL >> 16)) >> 8).double() * 2.0**-24
    numbers_BL[:, :1] = uniforms_B.double().clamp(0.0, BELOW_ONE)[:, None]
    return numbers_BL


def _descend(masses_BN: Tensor, numbers_BL: Tensor) -> Tensor:
    """From the root of a tree over N leaves to one of them, int64 [B]; any one if there are NaNs."""
    missing = FANOUT ** numbers_BL.shape[1] - masses_BN.shape[1]
    levels = [torch.nn.functional.pad(masses_BN, (0, missing)) if missing else masses_BN]  # from the leaves up
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


@torch.no_grad()
def edge_distances(logits_BV: Tensor, uniforms_B: Tensor, tokens_B: Tensor, temperature: float = 1.0) -> Tensor:
    """How close the numbers came to drawing another token than this one: float64 [B], negative if they do draw another.

    The smallest distance of a level's number from an edge of what it picks, both in [0, 1). Logits that differ by
    rounding move the edges by about 1e-7, so only a token with a smaller distance may flip.
    """
    num_rows, vocab_size = logits_BV.shape
    num_levels = _depth(-(-vocab_size // BLOCK)) + _depth(BLOCK)
    masses_BV = torch.nn.functional.pad(
        (logits_BV.double() / temperature).softmax(dim=1), (0, FANOUT**num_levels - vocab_size)
    )
    numbers_BL = level_uniforms(uniforms_B, num_levels)
    rows_B, nearest_B = torch.arange(num_rows), torch.full((num_rows,), torch.inf, dtype=torch.float64)
    for level in range(num_levels):
        leaves = FANOUT ** (num_levels - level - 1)  # below each child
        masses_BMF = masses_BV.view(num_rows, -1, FANOUT, leaves).sum(dim=3)
        path_B = tokens_B // leaves
        cdf_BF = masses_BMF[rows_B, path_B // FANOUT].cumsum(dim=1)
        cdf_BF = torch.nn.functional.pad(cdf_BF / cdf_BF[:, -1:], (1, 0))
        below_B, above_B = (cdf_BF[rows_B, path_B % FANOUT + i] for i in (0, 1))
        number_B = numbers_BL[:, level]
        # 0 and 1 are no edges to other tokens
        down_B = torch.where(below_B > 0, number_B - below_B, torch.inf)
        up_B = torch.where(above_B < 1 - 1e-15, above_B - number_B, torch.inf)
        nearest_B = torch.minimum(nearest_B, torch.minimum(down_B, up_B))
    return nearest_B


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
