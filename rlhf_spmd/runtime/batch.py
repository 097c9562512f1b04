"""From stored prompts and responses to the tokens of a forward pass, and back to per-response-token tensors."""

# B sequences, P prompt tokens, G response tokens (padded with -1), T tokens of both, V vocabulary, D hidden

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_spmd.algorithms.ppo_math import ban_tokens, kept_logprobs, token_logprobs
from rlhf_spmd.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Sequences:
    """Left-aligned sequences: the prompt, the response right after it, padding (-1) on the right only."""

    tokens_BT: Tensor
    prompt_lengths_B: Tensor
    response_lengths_B: Tensor
    responses_BG: Tensor

    @classmethod
    def join(cls, prompts_BP: Tensor, responses_BG: Tensor) -> "Sequences":
        """prompts_BP, responses_BG int64 padded with -1. T is the longest row of this batch."""
        prompt_B, response_B = (prompts_BP >= 0).sum(1), (responses_BG >= 0).sum(1)
        num_rows, max_response = responses_BG.shape
        wide_BT = prompts_BP.new_full((num_rows, prompts_BP.shape[1] + max_response), -1)
        wide_BT[:, : prompts_BP.shape[1]] = prompts_BP
        slots_BG = prompt_B[:, None] + torch.arange(max_response, device=prompts_BP.device)
        wide_BT.scatter_(1, slots_BG, responses_BG)
        return cls(wide_BT[:, : int((prompt_B + response_B).max())], prompt_B, response_B, responses_BG)

    def before(self, hidden_BTD: Tensor, num: int) -> Tensor:
        """Hidden states at the positions that predict response tokens 0 .. num-1: [B, num, D]. Beyond a row's last
        token the state is some other one: mask what is made of it."""
        slots_BG = self.prompt_lengths_B[:, None] - 1 + torch.arange(num, device=hidden_BTD.device)
        slots_BG = slots_BG.clamp(max=hidden_BTD.shape[1] - 1)
        return hidden_BTD.gather(1, slots_BG[..., None].expand(-1, -1, hidden_BTD.shape[2]))


def response_logprobs(
    model: Transformer,
    batch: Sequences,
    kept_BGK: Tensor | None = None,
    *,
    temperature: float,
    eos_ids: tuple[int, ...],
    min_new_tokens: int,
) -> Tensor:
    """Teacher-forced logprobs_BG of the response tokens under the distribution they were sampled from; 0 on padding.

    kept_BGK: the sets that the tokens were drawn from, if sampling was restricted.
    """
    hidden_BGD = batch.before(model(batch.tokens_BT), batch.responses_BG.shape[1])
    logits_BGV = ban_tokens(model.logits(hidden_BGD), eos_ids, min_new_tokens)
    if kept_BGK is not None:
        return kept_logprobs(logits_BGV, batch.responses_BG, kept_BGK, temperature)
    return token_logprobs(logits_BGV, batch.responses_BG, temperature)


def response_values(model: Transformer, batch: Sequences) -> Tensor:
    """values_BG1: the value before each response token and, in column len, after the last one; 0 beyond. At least
    float32."""
    num_columns = batch.responses_BG.shape[1] + 1
    values_BG1 = model.scalar(batch.before(model(batch.tokens_BT), num_columns))
    columns = torch.arange(num_columns, device=values_BG1.device)
    values_BG1 = values_BG1.to(torch.promote_types(values_BG1.dtype, torch.float32))
    return torch.where(columns <= batch.response_lengths_B[:, None], values_BG1, 0.0)


def sequence_scores(model: Transformer, tokens_BT: Tensor) -> Tensor:
    """scores_B: the scalar head at each row's last real token (as AutoModelForSequenceClassification pools)."""
    last_B = (tokens_BT >= 0).sum(1) - 1
    hidden_BTD = model(tokens_BT)
    rows_B = torch.arange(len(last_B), device=last_B.device)
    return model.scalar(hidden_BTD[rows_B, last_B]).float()
