"""Best of n: of the samples of a prompt, the one with the highest score, as a row that supervised fine-tuning reads.

A reward function scores, or a reward model. Each rank scores the responses that it reports, with a reward model of its
own.
"""

# R responses

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlhf_spmd.config.model_folders import same_tokenizer
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import is_folder
from rlhf_spmd.model.adapters.uniform import BASE_HERE, model_files
from rlhf_spmd.model.adapters.unmerged import load_any
from rlhf_spmd.model.hf import read_config
from rlhf_spmd.model.sequences import Sequences, forward, sequence_scores
from rlhf_spmd.model.texts.tokenizer import Tokenizer
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.data.prompts import pad
from rlhf_spmd.runtime.offline.options import GenerateOptions
from rlhf_spmd.runtime.offline.prompts import Prompt
from rlhf_spmd.runtime.rewards.function import load_reward_function
from rlhf_spmd.runtime.rewards.styles import Scored
from rlhf_spmd.runtime.rewards.texts import RewardTexts
from rlhf_spmd.runtime.weights.rank_models import DTYPES

ROWS_AT_ONCE = 16  # responses in a forward of a reward model


class Judge:
    """Scores responses. Raises UserError for a reward that cannot be loaded or fails."""

    def __init__(
        self,
        options: GenerateOptions,
        model: str,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        device: torch.device,
    ):
        """Prepares the choice of the best responses.

        model, tokenizer: of generation.
        """
        reward, self.device, self.of_responses = options.best_of, device, tokenizer
        self.function = self.model = self.texts = None
        self.key = options.data.key or "prompt"
        if is_folder(reward):
            dtype = DTYPES[options.dtype]
            self.model = load_any(reward, head="scalar", dtype=dtype, device=device).eval()
            longest = max((len(prompt.tokens) + prompt.sampling.max_new_tokens for prompt in prompts), default=0)
            self.model.ropes.longest = longest
            reward, files = model_files(reward, option=BASE_HERE).folder, model_files(model, option=BASE_HERE)
            if not same_tokenizer(reward, files.tokenizer):
                self.texts = RewardTexts(reward, self.model.config, self.key, "reward model", started=options.started)
                self.texts.try_on(prompt.columns for prompt in prompts)
            elif self.model.config.vocab_size < tokenizer.known(read_config(files.folder).vocab_size).stop:
                raise UserError(
                    f"best_of={reward}: the reward model has {self.model.config.vocab_size} tokens, fewer than the "
                    f"tokenizer of {model}; resize its embeddings"
                )
        else:
            columns = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
            self.function = load_reward_function(reward, list(columns))

    def scores(
        self, prompts: Sequence[Prompt], lines: Sequence[Mapping[str, Any]], tokens: Sequence[Sequence[int]]
    ) -> list[float]:
        """Returns one score for each response. lines, tokens: of the responses, with `response` and `finish`."""
        responses = [line["response"] for line in lines]
        if self.function is not None:
            columns = [prompt.columns for prompt in prompts]
            texts = [prompt.text for prompt in prompts]
            given = self.function.score(Scored(texts, responses, tokens, columns, key=self.key))[0]
            found = [score for score in given if score is not None]
            if len(found) < len(given):
                raise UserError(f"{self.function.name} gives a response no score; return a number for each")
            return found
        assert self.model is not None, "a function or a model scores"
        if self.texts is not None:
            rows = [self._of_text(self.texts, *row) for row in zip(prompts, lines, tokens, strict=True)]
        else:
            rows = [[*prompt.tokens, *response] for prompt, response in zip(prompts, tokens, strict=True)]
        found = []
        for start in range(0, len(rows), ROWS_AT_ONCE):
            found += self._scores_of_model(self.model, rows[start : start + ROWS_AT_ONCE])
        return found

    def _of_text(self, texts: RewardTexts, prompt: Prompt, line: Mapping[str, Any], tokens: Sequence[int]) -> list[int]:
        """Returns the tokens of a reward model with another tokenizer."""
        text = self.of_responses.decode_pair(prompt.tokens, tokens)[0]
        return texts.tokens(text, line["response"], ended=line["finish"] != "length", columns=prompt.columns)

    @torch.no_grad()
    def _scores_of_model(self, model: Transformer, rows: Sequence[Sequence[int]]) -> list[float]:
        batch = Sequences.of(pad(rows).to(self.device))
        return sequence_scores(model, batch, forward(model, batch)).tolist()


def best_lines(lines: Sequence[Mapping[str, Any]], scores_R: Sequence[float], samples: int) -> list[dict[str, Any]]:
    """Returns, for each prompt, the line with the highest score, the first of equal ones, with `completion` in the
    place of `response`. A response that was cut is taken only if all samples of its prompt were.

    lines: samples of a prompt are neighbours.
    """
    best = []
    for start in range(0, len(lines), samples):
        group = range(start, start + samples)
        ended = [row for row in group if lines[row]["finish"] != "length"] or list(group)
        chosen = max(ended, key=lambda row: (scores_R[row], -row))
        line = {"completion" if name == "response" else name: value for name, value in lines[chosen].items()}
        mean = sum(scores_R[row] for row in group) / samples
        best.append(line | {"score": scores_R[chosen], "mean_score": mean})
    return best
