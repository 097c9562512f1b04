"""sample() where every tensor-parallel rank holds the logits of a slice of the vocabulary. All ranks draw the same
token, the one that sample() draws from whole rows.

On a GPU the slices are gathered and every rank draws from whole rows with the kernels of sample(): 256 rows of 128,256
logits in bfloat16 are 66 MB, 0.1 to 0.2 ms over NVLink, and nothing waits for the host. On a CPU messages are slow, and
whole rows are never sent:

- Unrestricted rows take two messages: row maxima with block masses, then the logits of the chosen block.
- Restricted rows take one: maxima, sums and the largest logits of each slice with their ids. Rows whose support does
  not fit take further messages with more logits; all ranks decide this identically.

Batches of both kinds share the first message. Every rank draws from bitwise equal data.

Legend: B sequences, R some of them, v a slice of the vocabulary, S slices, N blocks, K tokens of a block, C candidates.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.kernels.cdf_tree import BLOCK, LEVELS_INSIDE, descend, level_numbers, levels_over
from rlhf_spmd.kernels.collectives import all_gather
from rlhf_spmd.kernels.sample import sample
from rlhf_spmd.kernels.sample_cpu import block_masses, draw_inside, draw_listed, empty
from rlhf_spmd.kernels.support import Rules, Sampled, first_candidates, in_order, largest, make_rules

WIDER = 8  # factor by which the number of candidates grows for rows that need more


@torch.no_grad()
def sample_shard(
    logits_Bv: Tensor,
    bits_B,
    *,
    slices: Sequence[range],
    group: dist.ProcessGroup,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    num_stored: int = 0,
) -> Sampled:
    """Samples rows whose logits [B, v] each rank of the group holds for its slice of the vocabulary, as sample() does.

    slices: of each rank, consecutive; they need not align with the blocks, and the last ones may be empty.

    All arguments except the logits, and the result, are the same on all ranks.
    """
    vocabulary, vocab_size = slices[group.rank()], slices[-1].stop
    assert logits_Bv.shape[1] == len(vocabulary) and vocabulary.step == 1 and len(slices) == group.size()
    if logits_Bv.is_cuda:
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        return sample(gather_slices(logits_Bv, slices, group), bits_B, **options, num_stored=num_stored)
    like_B1 = logits_Bv.new_empty(len(logits_Bv), 1).expand(-1, vocab_size)  # the shape of whole rows
    rules = make_rules(like_B1, temperature, top_k, top_p, min_p, num_stored)
    bits_B = torch.as_tensor(bits_B, device=logits_Bv.device)
    sampled = empty(logits_Bv, rules, num_stored)
    if len(logits_Bv) == 0:
        return sampled
    listed_B = rules.restricted(vocab_size) | (num_stored > 0)
    open_R, left_R = (~listed_B).nonzero()[:, 0], listed_B.nonzero()[:, 0]
    num = first_candidates(rules.rows(left_R), vocab_size, num_stored) if len(left_R) else 0

    local_max_B, local_Bn = block_masses(logits_Bv, rules.temperature_B, offset=vocabulary.start % BLOCK)
    first, num_blocks = vocabulary.start // BLOCK, -(-vocab_size // BLOCK)
    local_BN = torch.nn.functional.pad(local_Bn, (first, num_blocks - first - local_Bn.shape[1]))
    masses = local_BN if len(open_R) else local_BN.sum(1, keepdim=True)  # restricted rows need only the sum
    own = _local_candidates(logits_Bv[left_R], rules.rows(left_R), num, vocabulary)
    max_SB, masses_SBN, *lists = _from_all((local_max_B, masses, *own), group)
    max_B = max_SB.amax(0)
    shares_SB = torch.where(max_SB == -torch.inf, 0.0, (max_SB - max_B).exp())  # an all-banned slice adds nothing
    masses_BN = (shares_SB[:, :, None] * masses_SBN).sum(0)
    max_B, total_B = max_B.to(local_max_B.dtype), masses_BN.sum(1)

    while len(left_R):
        here = (max_B[left_R], total_B[left_R], bits_B[left_R], rules.rows(left_R), vocab_size, num_stored)
        z, ids, below = lists
        part, certain_R = draw_listed(*_merged(z, ids, below, max_B.dtype, complete=num == vocab_size), *here)
        sampled.put(left_R, part)  # rows that are not certain are drawn again
        left_R = left_R[~certain_R]
        if len(left_R):
            num = min(num * WIDER, vocab_size)
            lists = _from_all(_local_candidates(logits_Bv[left_R], rules.rows(left_R), num, vocabulary), group)
    if len(open_R):
        of_rows = (max_B[open_R], masses_BN[open_R], bits_B[open_R], rules.temperature_B[open_R])
        sampled.put(open_R, _draw_unrestricted(logits_Bv[open_R], *of_rows, vocabulary, vocab_size, group))
    return sampled


def gather_slices(logits_Bv: Tensor, slices: Sequence[range], group: dist.ProcessGroup) -> Tensor:
    """Gathers whole rows of logits [B, V] from the slices of all ranks, in one message."""
    missing = max(map(len, slices)) - logits_Bv.shape[1]
    mine_Bv = torch.nn.functional.pad(logits_Bv, (0, missing)) if missing else logits_Bv.contiguous()
    all_SBv = mine_Bv.new_empty(group.size(), *mine_Bv.shape)
    all_gather(all_SBv.flatten(0, 1), mine_Bv, group=group)
    return torch.cat([part_Bv[:, : len(ids)] for part_Bv, ids in zip(all_SBv, slices, strict=True)], dim=1)


def _from_all(parts: tuple[Tensor, ...], group: dist.ProcessGroup) -> list[Tensor]:
    """Gathers every rank's tensors, each float64 [S, ...], in one message; ids and masses are exact in float64."""
    mine = torch.cat([part.double().flatten() for part in parts])
    out = mine.new_empty(group.size() * len(mine))
    all_gather(out, mine, group=group)
    sizes = [part.numel() for part in parts]
    pieces = out.view(group.size(), -1).split(sizes, dim=1)
    return [piece.reshape(group.size(), *part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _local_candidates(logits_Rv: Tensor, rules: Rules, num: int, vocabulary: range) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the largest z of this slice and their ids [R, C], padded with -inf, and below_R: tokens with z > below_R
    are all listed."""
    here = min(num, len(vocabulary))
    values_RC, ids_RC = largest(logits_Rv, here)
    z_RC = values_RC / rules.temperature_B[:, None]
    below_R = z_RC[:, -1] if 0 < here < len(vocabulary) else torch.full_like(rules.temperature_B, -torch.inf)
    z_RC = torch.nn.functional.pad(z_RC, (0, num - here), value=-torch.inf)
    return z_RC, torch.nn.functional.pad(ids_RC + vocabulary.start, (0, num - here), value=-1), below_R


def _merged(
    z_SRC: Tensor, ids_SRC: Tensor, below_SR: Tensor, dtype: torch.dtype, complete: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Merges the lists of the slices into one per row."""
    z_RC, ids_RC = (x_SRC.transpose(0, 1).flatten(1) for x_SRC in (z_SRC.to(dtype), ids_SRC.long()))
    return *in_order(z_RC, ids_RC), None if complete else below_SR.amax(0).to(dtype)


def _draw_unrestricted(
    logits_Rv: Tensor,
    max_R: Tensor,
    masses_RN: Tensor,
    bits_R: Tensor,
    temperature_R: Tensor,
    vocabulary: range,
    vocab_size: int,
    group: dist.ProcessGroup,
) -> Sampled:
    """Draws from unrestricted rows. The owners send the logits of each row's block (the second message)."""
    over = levels_over(vocab_size)
    numbers_RL = level_numbers(bits_R.cpu().numpy(), over + LEVELS_INSIDE)
    blocks_R = torch.from_numpy(descend(masses_RN.cpu().numpy(), numbers_RL[:, :over])).to(logits_Rv.device)
    ids_RK = blocks_R[:, None] * BLOCK + torch.arange(BLOCK, device=logits_Rv.device)
    here_RK = (ids_RK >= vocabulary.start) & (ids_RK < vocabulary.stop)
    z_RK = torch.zeros(ids_RK.shape, dtype=temperature_R.dtype, device=ids_RK.device)
    if len(vocabulary):
        own_RK = logits_Rv.gather(1, (ids_RK - vocabulary.start).clamp_(0, len(vocabulary) - 1))
        z_RK = torch.where(here_RK, own_RK / temperature_R[:, None], 0.0)
    dist.all_reduce(z_RK, group=group)  # every other rank adds 0
    z_RK = z_RK.masked_fill(ids_RK >= vocab_size, -torch.inf)
    return draw_inside(z_RK, max_R, blocks_R, numbers_RL[:, over:], masses_RN.sum(1), None, vocab_size)
