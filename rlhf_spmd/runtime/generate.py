"""Sampling responses with a KV cache. The token at a position depends on its own uniform number and on nothing else:
not on the batch it is decoded in, nor on the rank.

The ranks of one copy of a model run the same loop on the same rows: those of a stage see all logits, and draw alike;
hidden states go from stage to stage, and the tokens from the last stage back to all.
"""

# B sequences, P prompt tokens, G response tokens, V vocabulary, D hidden

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.algorithms.ppo_math import ban_tokens
from rlhf_spmd.kernels.sample import kept_tokens, restrict, sample_ref
from rlhf_spmd.model.attention import Rows
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.kvcache import KVCache
from rlhf_spmd.runtime.vocabulary import whole_logits


@torch.no_grad()
def generate(
    model: Transformer,
    prompts_BP: Tensor,
    uniforms_BG: Tensor,
    *,
    temperature: float = 1.0,
    eos_ids: Sequence[int] = (),
    min_new_tokens: int = 0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Samples one response per row.

    prompts_BP: int64, -1 right of the prompt. uniforms_BG: one number in [0, 1) per token. Returns responses_BG int64
    (-1 after the end; the EOS is included), logprobs_BG float32 under the distribution sampled from (0 after the end),
    and, if top_k is on, kept_BGK int32, the set that each token was drawn from (see kernels/sample.py; -1 padding).
    """
    num_rows, max_response = uniforms_BG.shape
    device = prompts_BP.device
    responses_BG = torch.full((num_rows, max_response), -1, dtype=torch.int64, device=device)
    logprobs_BG = torch.zeros(num_rows, max_response, device=device)
    kept_BGK = None
    if top_k:
        kept_BGK = torch.full((num_rows, max_response, top_k), -1, dtype=torch.int32, device=device)
    if num_rows == 0:
        return responses_BG, logprobs_BG, kept_BGK
    lengths_B = (prompts_BP >= 0).sum(1)
    prompts_BP = prompts_BP[:, : int(lengths_B.max())]
    cache = KVCache(model, num_rows, prompts_BP.shape[1] + max_response, device)
    rows_B = torch.arange(num_rows, device=device)  # rows still being decoded
    hidden_BPD = _through_stages(model, prompts_BP, Rows.first(prompts_BP.shape[1], device, cache))
    hidden_BD = hidden_BPD[rows_B, lengths_B - 1]
    cache.prefilled(lengths_B)
    eos_E = torch.tensor(list(eos_ids), dtype=torch.int64, device=device)

    for t in range(max_response):
        tokens_B = torch.empty_like(rows_B)
        if model.parallel.is_last:
            logits_B1V = whole_logits(model, model.logits(hidden_BD))[:, None]
            if t < min_new_tokens:
                logits_B1V = ban_tokens(logits_B1V, eos_ids, 1)
            logits_BV = logits_B1V[:, 0]
            if kept_BGK is not None:
                kept_BK = kept_tokens(logits_BV, temperature, top_k=top_k, top_p=top_p, min_p=min_p)
                kept_BGK[rows_B, t, : kept_BK.shape[1]] = kept_BK.int()
                logits_BV = restrict(logits_BV, kept_BK)
            tokens_B, token_logprobs_B = sample_ref(logits_BV, uniforms_BG[rows_B, t], temperature)
            logprobs_BG[rows_B, t] = token_logprobs_B.float()
        _from_last_stage(model, tokens_B)
        responses_BG[rows_B, t] = tokens_B
        running_B = ~torch.isin(tokens_B, eos_E)
        if t + 1 == max_response or not running_B.any():
            break
        if not running_B.all():
            left = running_B.nonzero()[:, 0]
            rows_B, tokens_B = rows_B[left], tokens_B[left]
            cache.keep(left)
        context = Rows(cache.lengths_B[:, None], cache)
        hidden_BD = _through_stages(model, tokens_B[:, None], context)[:, 0]
        cache.advance()
    for result in (logprobs_BG, kept_BGK):
        if result is not None:
            _from_last_stage(model, result)
    return responses_BG, logprobs_BG, kept_BGK


def _through_stages(model: Transformer, tokens_BT: Tensor, context: Rows) -> Tensor:
    """Runs this rank's stage between the one before and the one after -> its output hidden_BTD."""
    parallel, hidden_BTD = model.parallel, None
    if parallel.previous is not None:
        shape = (*tokens_BT.shape, model.config.hidden_size)
        hidden_BTD = torch.empty(shape, dtype=model.dtype, device=tokens_BT.device)
        dist.recv(hidden_BTD, src=parallel.previous)
    hidden_BTD = model(tokens_BT, context=context, hidden=hidden_BTD)
    if parallel.next is not None:
        dist.send(hidden_BTD.contiguous(), dst=parallel.next)
    return hidden_BTD


def _from_last_stage(model: Transformer, x: Tensor) -> None:
    """Puts into x, on every stage, what it holds on the last."""
    parallel = model.parallel
    if parallel.stages is not None:
        dist.broadcast(x, group_src=parallel.shard.pp - 1, group=parallel.stages)
