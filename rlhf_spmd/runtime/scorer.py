"""Scores of whole responses: a reward model, a Python reward function, or their sum."""

# B sequences, P prompt tokens, G response tokens, T tokens

import torch
from torch import Tensor

from rlhf_spmd.config import Config, same_tokenizer
from rlhf_spmd.errors import UserError
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
            found = self.function(*map(list, zip(*self._texts(prompts_BP, responses_BG), strict=True)))
            scores_B += torch.tensor(found, device=scores_B.device)
        return scores_B

    def _texts(self, prompts_BP: Tensor, responses_BG: Tensor) -> list[tuple[str, str]]:
        """Prompt and response of each row, padding dropped, special tokens skipped."""
        rows = zip(prompts_BP.tolist(), responses_BG.tolist(), strict=True)
        return [self.tokenizer.decode_pair(*(_real(tokens) for tokens in row)) for row in rows]

    def _tokens(self, prompts_BP: Tensor, responses_BG: Tensor) -> Tensor:
        if self.own_tokenizer is None:
            return Sequences.join(prompts_BP, responses_BG).tokens_BT
        limit = self.model.config.max_position_embeddings
        texts = (prompt + response for prompt, response in self._texts(prompts_BP, responses_BG))
        tokens_BT = pad([self.own_tokenizer.encode(text)[-limit:] for text in texts]).to(prompts_BP.device)
        if int(tokens_BT.max()) >= self.model.config.vocab_size:
            raise UserError(
                f"the tokenizer of the reward model made token {int(tokens_BT.max())}, but the model knows "
                f"{self.model.config.vocab_size} tokens; give models.reward the tokenizer that belongs to it"
            )
        return tokens_BT


def _real(tokens: list[int]) -> list[int]:
    return [token for token in tokens if token >= 0]
