"""Scores whole responses: makes the input of a reward model, and calls Python reward functions."""

# B sequences, P prompt tokens, G response tokens, T tokens

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf_spmd.config.model_folders import same_tokenizer
from rlhf_spmd.config.options import Config, function_labels, split_functions
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.hf import read_config
from rlhf_spmd.model.sequences import Sequences
from rlhf_spmd.model.texts.tokenizer import Tokenizer
from rlhf_spmd.runtime.data.prompts import PromptSet, pad, unread
from rlhf_spmd.runtime.data.readers import CONVERSATIONS
from rlhf_spmd.runtime.rewards.function import label_of, load_reward_function, response_of
from rlhf_spmd.runtime.rewards.styles import READ_BY_WORDS, Scored
from rlhf_spmd.runtime.rewards.texts import RewardTexts
from rlhf_spmd.runtime.rewards.workers import RewardWorkers


@dataclass(frozen=True, slots=True)
class Judged:
    """Scores of rows. logs: numbers of each row for the log, by name; None where there is none. late: rows for which a
    reward function ran out of time."""

    scores_B: Tensor  # float32
    logs: dict[str, list[float | None]] = field(default_factory=dict)
    late: Set[int] = frozenset()


class Scorer:
    """Prepares rows for the reward model and calls the reward function. The function, and a reward model with another
    tokenizer than the actor, get decoded text."""

    def __init__(
        self,
        config: Config,
        role: str,
        tokenizer: Tokenizer,
        data: PromptSet | None = None,
        *,
        calls: bool = True,
        beat: Callable[[], None] = lambda: None,
    ):
        """Prepares the scoring of responses on this rank.

        role: the judge.
        tokenizer: the first role's.
        data: whose further columns reward functions may ask for.
        calls: whether this rank calls the reward functions, and starts workers for them.
        beat: see RewardWorkers.
        """
        folder = config.files(role).folder
        self.role, self.tokenizer, self.data = role, tokenizer, data
        self.shape: ModelConfig | None = read_config(folder) if folder else None  # None: the reward is a function
        columns = data.column_names if data is not None else ()
        self.specs, self.labels = split_functions(config.reward_function), function_labels(config)
        self.key = config.data.key or config.algorithm.prompts
        self.functions, self.workers = [], None
        self.notes: list[str] = []  # for the banner
        if not config.reward_workers:
            self.functions = [load_reward_function(spec, columns) for spec in self.specs]
            if not config.environment:  # which may read any
                read = {name for each in self.functions for name in (*each.bound.columns, *each.bound.words)}
                self.notes = unread(columns, {self.key, *CONVERSATIONS, *read, *READ_BY_WORDS})
        elif calls:
            num, timeout_s = config.reward_workers, config.reward_timeout_s
            self.workers = RewardWorkers(self.specs, columns, num=num, timeout_s=timeout_s, beat=beat)
        self.weights = config.reward_weights or (1.0,) * len(self.specs)
        self.late_score = config.reward_on_timeout
        self.texts = None
        if self.shape is not None and reads_text(config, role):
            self.texts = RewardTexts(folder, self.shape, self.key, role, started=config.started)
            if data is not None:
                self.texts.try_on(data.records([index])[0] for index in range(len(data)))

    def of_functions(self, prompts_BP: Tensor, responses_BG: Tensor, index_B: Sequence[int]) -> Judged:
        """Returns the weighted sums of all functions, and for the log the scores of each that is a part of a sum, and
        whatever else they return. A function that ran out of time does not apply to the row. Raises UserError if a
        function fails (see function.py), or if none applies to a row for another reason than time.

        index_B: of the prompts in the data set.
        """
        texts = self._texts(prompts_BP, responses_BG)
        tokens = [[token for token in row if token >= 0] for row in responses_BG.tolist()]
        columns = self.data.whole_records(index_B) if self.data is not None else []
        rows = Scored([prompt for prompt, _ in texts], [response for _, response in texts], tokens, columns, self.key)
        total_B: list[float | None] = [None] * len(rows)
        logs: dict[str, list[float | None]] = {}
        if self.workers is not None:
            by_function, late = self.workers.score(rows)
        else:
            by_function, late = [function.score(rows) for function in self.functions], set()
        for spec, (scores, more), weight in zip(self.specs, by_function, self.weights, strict=True):
            logs |= more | ({label_of(spec): scores} if label_of(spec) in self.labels else {})
            for row, score in enumerate(scores):
                if score is not None:
                    total_B[row] = (total_B[row] or 0.0) + weight * score
        for row, total in enumerate(total_B):
            if total is None and row not in late:
                raise UserError(
                    f"no reward function ({', '.join(self.specs)}) gives {response_of(rows, row)} a score: return a "
                    "number, or add a function that applies to such rows"
                )
            total_B[row] = self.late_score if total is None else total
        return Judged(torch.tensor(total_B, device=prompts_BP.device), logs, late)

    def _texts(self, prompts_BP: Tensor, responses_BG: Tensor) -> list[tuple[str, str]]:
        """Returns prompt and response of each row, without padding and special tokens."""
        return list(map(self.tokenizer.decode_pair, prompts_BP.tolist(), responses_BG.tolist()))

    def batch(self, prompts_BP: Tensor, responses_BG: Tensor, ended_B: Tensor, index_B: Sequence[int]) -> Sequences:
        """Returns the reward model's input for these rows.

        ended_B: whether each response ended by itself.
        index_B: of the prompts in the data set.
        """
        if self.texts is None:
            return Sequences.join(prompts_BP, responses_BG)
        records = self.data.records(index_B) if self.data is not None else [{}] * len(index_B)
        rows = zip(self._texts(prompts_BP, responses_BG), ended_B.tolist(), records, strict=True)
        made = [self.texts.tokens(*texts, ended=ended, columns=columns) for texts, ended, columns in rows]
        return Sequences.of(pad(made).to(prompts_BP.device))


def reads_text(config: Config, role: str) -> bool:
    """Returns whether a judge is a model with another tokenizer than the first role's, so that it gets text."""
    folder = config.files(role).folder
    return bool(folder) and not same_tokenizer(folder, config.files().tokenizer)
