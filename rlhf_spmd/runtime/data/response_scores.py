"""Scores whole responses: makes the input of a reward model, and calls Python reward functions."""

# B sequences, P prompt tokens, G response tokens, T tokens

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_spmd.config import Config, split_functions
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.hf import load_tokenizer, read_config
from rlhf_spmd.model.sequences import Sequences
from rlhf_spmd.model.tokenizer import Tokenizer
from rlhf_spmd.model_folders import same_tokenizer
from rlhf_spmd.runtime.data.prompts import PromptSet, pad
from rlhf_spmd.runtime.data.reward_function import load_reward_function
from rlhf_spmd.runtime.data.reward_styles import Scored


class Scorer:
    """Prepares rows for the reward model and calls the reward function. The function, and a reward model with another
    tokenizer than the actor, get decoded text."""

    def __init__(self, config: Config, role: str, tokenizer: Tokenizer, data: PromptSet | None = None):
        """role: the judge. tokenizer: the first role's. data: whose further columns reward functions may ask for."""
        folder = config.folder(role)
        self.role, self.tokenizer, self.data = role, tokenizer, data
        self.shape: ModelConfig | None = read_config(folder) if folder else None  # None: the reward is a function
        columns = list(data.records([0])[0]) if data is not None else []
        self.functions = [load_reward_function(spec, columns) for spec in split_functions(config.reward_function)]
        self.weights = config.reward_weights or (1.0,) * len(self.functions)
        self.own_tokenizer = None
        if folder and not same_tokenizer(folder, config.main_folder):
            self.own_tokenizer = load_tokenizer(folder)

    def of_functions(
        self, prompts_BP: Tensor, responses_BG: Tensor, index_B: Sequence[int]
    ) -> tuple[Tensor, dict[str, list[float | None]]]:
        """scores_B float32, the weighted sum of all functions, and numbers of each row for the log: the scores of each
        function, if there are several, and whatever else the functions return. index_B: of the prompts in the data set.
        Raises UserError if a function fails (see reward_function.py), or if none applies to a row."""
        texts = self._texts(prompts_BP, responses_BG)
        tokens = [[token for token in row if token >= 0] for row in responses_BG.tolist()]
        columns = self.data.records(index_B) if self.data is not None else []
        rows = Scored([one for one, _ in texts], [one for _, one in texts], tokens, columns)
        total_B, applied_B, logs = [0.0] * len(rows), [False] * len(rows), {}
        for function, weight in zip(self.functions, self.weights, strict=True):
            scores, more = function.score(rows)
            logs |= more | ({function.label: scores} if len(self.functions) > 1 else {})
            for row, score in enumerate(scores):
                if score is not None:
                    total_B[row], applied_B[row] = total_B[row] + weight * score, True
        if not all(applied_B):
            row = applied_B.index(False)
            names = ", ".join(function.name for function in self.functions)
            raise UserError(
                f"no reward function ({names}) gives response {rows.responses[row][:60]!r} to prompt "
                f"{rows.prompts[row][:60]!r} a score: return a number, or add a function that applies to such rows"
            )
        return torch.tensor(total_B, device=prompts_BP.device), logs

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
