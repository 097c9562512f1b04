"""Episodes where several ranks generate with one copy of the model: the one that reports asks the environments, and
broadcasts their answers to the others, which parse nothing.

    openings   the number of tokens of each prompt, then the tokens
    answers    SIZE numbers at the beginning of every step of the engine, also where there are no answers

An answer is its row, the reason why the episode ends (0: it does not end), its stream (0: it opens no row), the number
of its tokens, and the tokens.
Answers are a stream, of which each step broadcasts the next part: a row continues in the step in which all of its
answer has come, the same on all ranks. So the actions of a rank follow from sampled tokens and answers alone, and no
rank makes a broadcast that another one leaves out.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rlhf_spmd.model.parallel import Parallel, broadcast_in_copy
from rlhf_spmd.runtime.generation.episodes import REASONS, Answer, Episodes

SIZE = 1024
HEADER = 4  # numbers before the tokens of an answer


class SharedEpisodes(Episodes):
    """The episodes of a call on one rank of a copy. All of these ranks call its methods in the same order."""

    def __init__(self, own: Episodes | None, num_rows: int, parallel: Parallel, device: torch.device):
        """own: those of the environments; None on ranks that receive them."""
        self.own, self.num_rows, self.parallel, self.device = own, num_rows, parallel, device
        self._outgoing: list[int] = []
        self._received: list[int] = []

    def openings(self) -> list[list[int]]:
        opened = self.own.openings() if self.own else [[]] * self.num_rows
        lengths = self._broadcast(list(map(len, opened))).tolist()
        tokens = [token for tokens in opened for token in tokens] or [0] * sum(lengths)
        if not tokens:  # answers open the rows
            return opened
        return [part.tolist() for part in self._broadcast(tokens).split(lengths)]

    def drew(self, row: int, token_ids: list[int]) -> None:
        if self.own:
            self.own.drew(row, token_ids)

    def cut(self, row: int, token_ids: list[int]) -> None:
        if self.own:
            self.own.cut(row, token_ids)

    def answers(self, wait_s: float) -> list[Answer]:
        for answer in self.own.answers(0.0 if self._outgoing else wait_s) if self.own else ():
            token_ids = answer.token_ids or ()
            end = 1 + REASONS.index(answer.reason) if answer.token_ids is None else 0
            self._outgoing += [answer.row, end, answer.stream, len(token_ids), *token_ids]
        part, self._outgoing = self._outgoing[: SIZE - 1], self._outgoing[SIZE - 1 :]
        num, *numbers = self._broadcast([len(part), *part, *[0] * (SIZE - 1 - len(part))]).tolist()
        self._received += numbers[:num]
        answers = []
        while len(self._received) >= HEADER and len(self._received) >= HEADER + self._received[HEADER - 1]:
            row, end, stream, num, *rest = self._received
            made = Answer(row, None, REASONS[end - 1]) if end else Answer(row, tuple(rest[:num]), stream=stream)
            answers.append(made)
            self._received = rest[num:]
        return answers

    def rewards(self, row: int, reason: str) -> Sequence[float]:
        return self.own.rewards(row, reason) if self.own else ()

    def is_dropped(self, row: int) -> bool:
        return self.own is not None and self.own.is_dropped(row)

    def counts(self) -> Mapping[str, tuple[float, int]]:
        return self.own.counts() if self.own else {}

    def seconds(self) -> Sequence[float]:
        return self.own.seconds() if self.own else ()

    def _broadcast(self, numbers: list[int]) -> Tensor:
        """Returns the numbers of the rank that asks, which are as many."""
        return broadcast_in_copy(torch.tensor(numbers, dtype=torch.int32, device=self.device), self.parallel)


def shared(ask: Callable[[], Episodes], num_rows: int, parallel: Parallel, device: torch.device) -> Episodes:
    """Returns the episodes of a call on a rank. ask: returns those of its environments, with so many rows."""
    if parallel.copy is None:
        return ask()
    return SharedEpisodes(ask() if parallel.reports else None, num_rows, parallel, device)
