"""The rows of optimizer steps that have a budget of tokens: a pure function of the seed, the same on any ranks.

Every epoch is a permutation of all rows (or their order in the files). A step takes the next rows as long as their
tokens stay within the budget and their number within `mini_batch`. No row is left out: what does not fit comes first in
the next step, and the last step of an epoch has the rows that are left.
"""

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.data.prompt_order import permutation
from rlhf_spmd.runtime.data.prompts import PromptSet

NO_ROW = -1  # a place of a step without a row


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Which rows each step reads.

    lengths: tokens of each row.
    most_tokens, most_rows: of a step.
    """

    lengths: np.ndarray
    most_tokens: int
    most_rows: int
    seed: int = 0
    shuffle: bool = True
    _ends: list[int] = field(default_factory=list, repr=False, compare=False)  # steps up to the end of each epoch
    _last: dict[int, list[np.ndarray]] = field(default_factory=dict, repr=False, compare=False)  # of the newest epoch

    def matrix(self, first: int, num: int) -> np.ndarray:
        """Returns the rows of some steps, int64 [num, most_rows], with NO_ROW in places that are not used. Those that
        are used are spread evenly, so that every data-parallel rank has its share."""
        rows_MC = np.full((num, self.most_rows), NO_ROW)
        for row_C, number in zip(rows_MC, range(first, first + num), strict=True):
            rows = self.step(number)
            row_C[np.arange(len(rows)) * self.most_rows // len(rows)] = rows
        return rows_MC

    def step(self, number: int) -> np.ndarray:
        """Returns the rows of a step (from 0)."""
        while not self._ends or self._ends[-1] <= number:
            before = self._ends[-1] if self._ends else 0
            self._ends.append(before + len(self._steps(len(self._ends))))
        epoch = int(np.searchsorted(self._ends, number, side="right"))
        return self._steps(epoch)[number - (self._ends[epoch - 1] if epoch else 0)]

    def num_steps(self, num_rows: Fraction | int) -> int:
        """Returns the steps that read so many rows."""
        found = read = 0
        while read < num_rows:
            read += len(self.step(found))
            found += 1
        return found

    def _steps(self, epoch: int) -> list[np.ndarray]:
        """Returns the rows of every step of an epoch."""
        if epoch not in self._last:
            size = len(self.lengths)
            order = permutation(self.seed, epoch, size) if self.shuffle else np.arange(size)
            total, start, steps = np.cumsum(self.lengths[order]), 0, []
            while start < size:
                before = total[start - 1] if start else 0
                end = int(np.searchsorted(total, before + self.most_tokens, side="right"))
                steps.append(order[start : min(end, start + self.most_rows)])
                start += len(steps[-1])
            self._last.clear()  # a cache: steps come in order
            self._last[epoch] = steps
        return self._last[epoch]


def order_of(prompts: PromptSet, most_tokens: int, most_rows: int) -> StepOrder:
    """Returns the order of the steps of a data set. A row counts what a model reads of it: the prompt with each
    response. Raises UserError for a row that is longer than the budget."""
    lengths = len(prompts.responses) * np.diff(prompts.prompts.ends, prepend=0)
    for rows in prompts.responses.values():
        lengths = lengths + np.diff(rows.ends, prepend=0)
    longest = int(lengths.argmax())
    if lengths[longest] > most_tokens:
        raise UserError(
            f"mini_batch_tokens={most_tokens}: the row of the prompt {prompts.texts[longest][:60]!r} alone has "
            f"{lengths[longest]} tokens: raise mini_batch_tokens to at least that, or cut or drop long rows "
            "(data.max_prompt, generation.max_new_tokens, data.long_prompts)"
        )
    return StepOrder(lengths, most_tokens, most_rows, prompts.seed, prompts.shuffle)
