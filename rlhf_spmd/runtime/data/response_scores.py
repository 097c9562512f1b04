"""Scores whole responses: makes the input of a reward model, and calls a Python reward function."""

# B sequences, P prompt tokens, G response tokens, T tokens

import torch
from torch import Tensor

from rlhf_spmd.config import Config
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.hf import load_tokenizer, read_config
from rlhf_spmd.model.sequences import Sequences
from rlhf_spmd.model.tokenizer import Tokenizer
from rlhf_spmd.model_folders import same_tokenizer
from rlhf_spmd.runtime.data.prompts import pad
from rlhf_spmd.runtime.data.reward_function import load_reward_function


class Scorer:
    """Prepares rows for the reward model and calls the reward function. The function, and a reward model with another
    tokenizer than the actor, get decoded text."""

    def __init__(self, config: Config, role: str, tokenizer: Tokenizer):
        """role: the judge. tokenizer: the first role's."""
        folder = config.folder(role)
        self.role, self.tokenizer = role, tokenizer
        self.shape: ModelConfig | None = read_config(folder) if folder else None  # None: the reward is a function
        self.function = load_reward_function(config.reward_function) if config.reward_function else None
        self.own_tokenizer = None
        if folder and not same_tokenizer(folder, config.main_folder):
            self.own_tokenizer = load_tokenizer(folder)

    def of_function(self, prompts_BP: Tensor, responses_BG: Tensor) -> Tensor:
        """scores_B float32. Raises UserError if the reward function fails (see reward_function.py)."""
        scores = self.function(*map(list, zip(*self._texts(prompts_BP, responses_BG), strict=True)))
        return torch.tensor(scores, device=prompts_BP.device)

    def _texts(self, prompts_BP: Tensor, responses_BG: Tensor) -> list[tuple[str, str]]:
        """Prompt and response of each row, without padding and special tokens."""
        return list(map(self.tokenizer.decode_pair, prompts_BP.tolist(), responses_BG.tolist()))

    def lengths(self, prompts_BP: Tensor, responses_BG: Tensor) -> list[int]:
        """Number of tokens of each row in the reward model's input."""
        return list(self.batch(prompts_BP, responses_BG).lengths) if len(prompts_BP) else []

    def batch(self, prompts_BP: Tensor, responses_BG: Tensor) -> Sequences:
        """The reward model's input for these rows."""
        if self.own_tokenizer is None:
            return Sequences.join(prompts_BP, responses_BG)
        limit = self.shape.max_position_embeddings
        texts = (prompt + response for prompt, response in self._texts(prompts_BP, responses_BG))
        tokens_BT = pad([self.own_tokenizer.encode(text)[-limit:] for text in texts]).to(prompts_BP.device)
        if int(tokens_BT.max()) >= self.shape.vocab_size:
            raise UserError(
                f"the tokenizer of the {self.role} made token {int(tokens_BT.max())}, but the model has "
                f"{self.shape.vocab_size} tokens; give models.{self.role} the tokenizer that belongs to it"
            )
        return Sequences.of(tokens_BT)
