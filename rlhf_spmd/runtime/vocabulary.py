"""Logprobs where every tp rank holds the logits of a slice of the vocabulary: no rank ever sees a whole row of them.

As in Megatron-LM (arXiv 1909.08053, section 3), a row's maximum and sum of exponentials travel, and the logits of the
few tokens asked for, each from its owner. Results are alike on all ranks of the group, and so must be what is made of
them: the backward pass sends nothing.
"""

# B sequences, R tokens, V this rank's slice of the vocabulary, W the whole of it, K kept tokens

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlhf_spmd.algorithms.ppo_math import scaled
from rlhf_spmd.model.parallel import gathered, maximum_over, sum_over
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.shard import split


def token_logprobs(
    logits_RV: Tensor, tokens_R: Tensor, *, vocabulary: range, temperature: float, group: dist.ProcessGroup
) -> Tensor:
    """log softmax(logits / temperature) over the whole vocabulary at the tokens: [R], at least float32."""
    scaled_RV = scaled(logits_RV, temperature)
    highest_R = maximum_over(scaled_RV.amax(1), group=group)
    shifted_RV = scaled_RV - highest_R[:, None]
    parts_R2 = torch.stack((shifted_RV.exp().sum(1), _own(shifted_RV, tokens_R[:, None], vocabulary)[:, 0]), 1)
    total_R, token_R = sum_over(parts_R2, group=group).unbind(1)
    return token_R - total_R.log()


def kept_logprobs(
    logits_RV: Tensor,
    tokens_R: Tensor,
    kept_RK: Tensor,
    *,
    vocabulary: range,
    temperature: float,
    group: dist.ProcessGroup,
) -> Tensor:
    """Like token_logprobs, over the kept set of each token (ids, -1 padding) alone: [R]."""
    wanted_RK1 = torch.cat((kept_RK.to(torch.int64), tokens_R[:, None]), 1)
    logits_RK1 = scaled(sum_over(_own(logits_RV, wanted_RK1, vocabulary), group=group), temperature)
    logits_RK = logits_RK1[:, :-1].masked_fill(kept_RK < 0, -math.inf)
    return logits_RK1[:, -1] - logits_RK.logsumexp(1)


def _own(logits_RV: Tensor, tokens_RK: Tensor, vocabulary: range) -> Tensor:
    """The logits of those tokens that lie in this rank's slice, 0 for the others."""
    local_RK = tokens_RK - vocabulary.start
    mine_RK = (local_RK >= 0) & (local_RK < len(vocabulary))
    return torch.where(mine_RK, logits_RV.gather(1, local_RK.clamp(0, len(vocabulary) - 1)), 0.0)


@torch.no_grad()
def whole_logits(model: Transformer, logits_BV: Tensor) -> Tensor:
    """The slices of all tp ranks side by side, the same bits on each: logits_BW."""
    parallel = model.parallel
    if parallel.group is None:
        return logits_BV
    tp = parallel.shard.tp
    slices = [len(split(model.config.vocab_size, tp, index)) for index in range(tp)]
    widest = max(slices)
    even_VB = F.pad(logits_BV, (0, widest - logits_BV.shape[1])).T  # slices differ by one; messages do not
    parts = gathered(even_VB, parallel.group).split(widest)
    return torch.cat([part[:size] for part, size in zip(parts, slices, strict=True)]).T.contiguous()
