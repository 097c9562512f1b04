"""Scores of whole responses: a reward model, a Python reward function, or their sum."""

# B sequences, P prompt tokens, G response tokens, T tokens

import torch
from torch import Tensor

from rlhf_spmd.config import Config, same_tokenizer
from rlhf_spmd.model.hf import load_tokenizer
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.batch import Sequences, sequence_scores
from rlhf_spmd.runtime.data import pad
from rlhf_spmd.runtime.reward_function import load_reward_function


class Scorer:
    """Called with the tokens of prompts and responses; the function, and a model of another tokenizer, get the text."""

    def __init__(self, config: Config, model: Transformer | None, tokenizer):
        self.model, self.tokenizer = model, tokenizer
        self.function = load_reward_function(config.reward_function) if config.reward_function else None
        self.own_tokenizer = None
        if model is not None and not same_tokenizer(config.models.reward, config.models.actor):
            self.own_tokenizer = load_tokenizer(config.models.reward)

    def __call__(self, prompts_BP: Tensor, responses_BG: Tensor, micro_batch: int) -> Tensor:
        """scores_B float32. Raises UserError if the reward function fails (see reward_function.py)."""
        scores_B = torch.zeros(len(prompts_BP), device=prompts_BP.device)
        if len(prompts_BP) == 0:
            return scores_B
        if self.model is not None:
            tokens_BT = self._tokens(prompts_BP, responses_BG)
            for start in range(0, len(tokens_BT), micro_batch):
                rows = slice(start, start + micro_batch)
                scores_B[rows] = sequence_scores(self.model, tokens_BT[rows])
        if self.function is not None:
            found = self.function(self.text(prompts_BP), self.text(responses_BG))
            scores_B += torch.tensor(found, device=scores_B.device)
        return scores_B

    def text(self, tokens_BT: Tensor) -> list[str]:
        """Rows as text, padding dropped, special tokens skipped."""
        return [self.tokenizer.decode([token for token in row if token >= 0]) for row in tokens_BT.tolist()]

    def _tokens(self, prompts_BP: Tensor, responses_BG: Tensor) -> Tensor:
        if self.own_tokenizer is None:
            return Sequences.join(prompts_BP, responses_BG).tokens_BT
        pairs = zip(self.text(prompts_BP), self.text(responses_BG), strict=True)
        limit = self.model.config.max_position_embeddings
        tokens = [self.own_tokenizer.encode(prompt + response)[-limit:] for prompt, response in pairs]
        return pad(tokens).to(prompts_BP.device)
