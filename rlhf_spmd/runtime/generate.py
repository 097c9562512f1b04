"""Sampling responses with a KV cache. The token at a position depends on its own uniform number and on nothing else:
not on the batch it is decoded in, nor on the rank."""

# B sequences, P prompt tokens, G response tokens, V vocabulary, D hidden

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_spmd.algorithms.ppo_math import ban_tokens
from rlhf_spmd.kernels.sample import sample_ref
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.kvcache import KVCache


@torch.no_grad()
def generate(
    model: Transformer,
    prompts_BP: Tensor,
    uniforms_BG: Tensor,
    *,
    temperature: float = 1.0,
    eos_ids: Sequence[int] = (),
    min_new_tokens: int = 0,
) -> tuple[Tensor, Tensor]:
    """Samples one response per row.

    prompts_BP: int64, -1 right of the prompt. uniforms_BG: one number in [0, 1) per token. Returns responses_BG int64
    (-1 after the end; the EOS is included) and logprobs_BG float32 under the tempered distribution (0 after the end).
    """
    num_rows, max_response = uniforms_BG.shape
    device = prompts_BP.device
    responses_BG = torch.full((num_rows, max_response), -1, dtype=torch.int64, device=device)
    logprobs_BG = torch.zeros(num_rows, max_response, device=device)
    if num_rows == 0:
        return responses_BG, logprobs_BG
    lengths_B = (prompts_BP >= 0).sum(1)
    prompts_BP = prompts_BP[:, : int(lengths_B.max())]
    dtype = model.embed_tokens.weight.dtype
    cache = KVCache(model.config, num_rows, prompts_BP.shape[1] + max_response, dtype, device)
    hidden_BPD = model(prompts_BP, cache=cache)
    hidden_BD = hidden_BPD[torch.arange(num_rows, device=device), lengths_B - 1]
    cache.prefilled(lengths_B)
    eos_E = torch.tensor(list(eos_ids), dtype=torch.int64, device=device)
    rows_B = torch.arange(num_rows, device=device)  # rows still being decoded

    for t in range(max_response):
        logits_B1V = model.logits(hidden_BD)[:, None]
        if t < min_new_tokens:
            logits_B1V = ban_tokens(logits_B1V, eos_ids, 1)
        tokens_B, token_logprobs_B = sample_ref(logits_B1V[:, 0], uniforms_BG[rows_B, t], temperature)
        responses_BG[rows_B, t], logprobs_BG[rows_B, t] = tokens_B, token_logprobs_B.float()
        running_B = ~torch.isin(tokens_B, eos_E)
        if t + 1 == max_response or not running_B.any():
            break
        if not running_B.all():
            left = running_B.nonzero()[:, 0]
            rows_B, tokens_B = rows_B[left], tokens_B[left]
            cache.keep(left)
        hidden_BD = model(tokens_B[:, None], positions_BT=cache.lengths_B[:, None], cache=cache)[:, 0]
        cache.advance()
    return responses_BG, logprobs_BG
