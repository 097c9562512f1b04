"""Episodes of several turns: what the engine asks the outside between two turns of a row, and which tokens it drew.

An *episode* is one row: the model draws a *turn*, the outside (tools, an environment) answers with tokens that the
model did not draw, the *observation*, and the model goes on. A row never ends before the model has drawn a token. If
episodes have several rows, an answer opens each with its prompt, or ends it unopened: then it is blank.
"""

# R requests, G longest response (drawn tokens and observations)

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

DRAWN, LAST = 1.0, 2.0  # in `actions`: a drawn token; the last one of an episode that ended by its own wish
BY_ITSELF = ("completed", "tool_stopped")  # reasons of the model or the environment; all others are limits
DRAWN_OUT, TOO_LONG = "max_sampled_tokens", "context_overflow"  # the engine's own reasons
OTHER_LIMITS = ("max_turns", "max_tokens", "max_tool_calls", "parse_error", "rollout_timeout")
REASONS = (*BY_ITSELF, DRAWN_OUT, TOO_LONG, *OTHER_LIMITS)  # why an episode ended


@dataclass(frozen=True, slots=True)
class Answer:
    """What comes back to a row. token_ids: the rest of the template, the observation and the beginning of the next
    turn, appended to the row, or the prompt that opens it; None: the episode is over. reason: why, one of REASONS.
    stream: of a row that is opened, the number of the sample whose random numbers draw it."""

    row: int
    token_ids: tuple[int, ...] | None
    reason: str = ""
    stream: int = 0


class Episodes(Protocol):
    """The outside of a generate call: what an engine asks, what the call begins with, and the rewards that training
    reads. row: the number of a request among those of the call."""

    def openings(self) -> list[list[int]]:
        """Returns the tokens of each row's prompt, as its environment opens it; asked once, before all else."""

    def drew(self, row: int, token_ids: list[int]) -> None:
        """Notes that the model ended a turn of this row with these drawn ids, the stop token included, if it drew one.
        A row that reaches a limit in the middle of a turn is over without this call."""

    def cut(self, row: int, token_ids: list[int]) -> None:
        """Notes what the model drew in the turn in which a limit ended the row."""

    def answers(self, wait_s: float) -> list[Answer]:
        """Returns the answers that have come back since; waits up to wait_s if nothing has."""

    def rewards(self, row: int, reason: str) -> Sequence[float]:
        """Returns the reward of each turn of a row that has ended: one for each call of `drew`, with the episode's own
        reward in the last. reason: why it ended, which of a limit of the engine only the engine knows."""

    def is_dropped(self, row: int) -> bool:
        """Returns whether a row must not be trained on, nor counted. Asked after the rewards of its group have been
        read."""
        return False

    def counts(self) -> Mapping[str, tuple[float, int]]:
        """Sums for the log, of all rows together, and of how many, once all of them are over."""
        return {}

    def seconds(self) -> Sequence[float]:
        """Returns the seconds of each answer."""
        return ()


@dataclass(slots=True)
class _Episode:
    """A row under way. turns: begin and end of each turn in the response; that under way has no end yet."""

    begin: int = 0
    turns: list[tuple[int, int]] = field(default_factory=list)
    reason: str = ""


class Turns:
    """The turns of an engine's rows: their limits, and which tokens of them were drawn."""

    def __init__(
        self,
        episodes: Episodes,
        max_new_tokens: int,
        max_row_tokens: int,
        bits_of: Callable[[int, int], Tensor] | None = None,
    ):
        """max_new_tokens: drawn tokens of a whole episode. max_row_tokens: those, and the observations between them.
        bits_of: returns the random bits [G] of a row with those of a sample, if answers open rows."""
        self.episodes, self.max_new_tokens, self.max_row_tokens = episodes, max_new_tokens, max_row_tokens
        self.bits_of = bits_of
        self.streams: dict[int, int] = {}  # of rows that were opened
        self._rows: dict[int, _Episode] = {}

    def begin_of(self, row: int) -> int:
        """Returns where the turn under way begins in the response."""
        return self._rows.setdefault(row, _Episode()).begin

    def most_of(self, row: int) -> int:
        """Returns the length of the response at which a limit ends the episode."""
        return min(self.max_row_tokens, self.begin_of(row) + self.max_new_tokens - self._num_drawn(row))

    def _num_drawn(self, row: int) -> int:
        """Returns the drawn tokens of the turns that have ended."""
        return sum(end - begin for begin, end in self._rows[row].turns)

    def end_turn(self, row: int, end: int) -> None:
        """Ends a turn before token `end` of the response."""
        begin = self.begin_of(row)
        self._rows[row].turns.append((begin, end))

    def cut(self, row: int, end: int) -> None:
        """Ends the episode at a limit in the middle of a turn."""
        self.end_turn(row, end)
        self._rows[row].reason = DRAWN_OUT if self._num_drawn(row) >= self.max_new_tokens else TOO_LONG

    def goes_on(self, answer: Answer, length: int) -> bool:
        """Returns whether an episode whose response has this length goes on with an answer: it does not if no token
        could be drawn after it."""
        episode = self._rows[answer.row]
        if answer.token_ids is None:
            episode.reason = answer.reason
        elif self._num_drawn(answer.row) >= self.max_new_tokens:
            episode.reason = DRAWN_OUT
        elif length + len(answer.token_ids) >= self.max_row_tokens:
            episode.reason = TOO_LONG
        else:
            episode.begin = length + len(answer.token_ids)
        if episode.reason and answer.token_ids is not None:
            self.episodes.cut(answer.row, [])
        return not episode.reason

    def reason(self, row: int) -> str:
        """Returns why the episode ended; empty for a blank row."""
        return self._rows[row].reason if row in self._rows else ""

    def num_turns(self, row: int) -> int:
        """Turns of an episode, with one that a limit cut."""
        return len(self._rows[row].turns)

    def actions(self, rows: Sequence[int]) -> Tensor:
        """Returns which tokens of the responses were drawn: actions_RG float32, 0 elsewhere (DRAWN, LAST)."""
        actions_RG = torch.zeros(len(rows), self.max_row_tokens)
        for actions_G, row in zip(actions_RG, rows, strict=True):
            episode = self._rows.get(row, _Episode())
            for begin, end in episode.turns:
                actions_G[begin:end] = DRAWN
            if episode.reason in BY_ITSELF:
                actions_G[episode.turns[-1][1] - 1] = LAST
        return actions_RG

    def rewards(self, rows: Sequence[int]) -> Tensor:
        """Returns the rewards of turns, each on the last token that it drew: rewards_RG float32, 0 elsewhere."""
        rewards_RG = torch.zeros(len(rows), self.max_row_tokens)
        for rewards_G, row in zip(rewards_RG, rows, strict=True):
            turns, rewards = self._rows.get(row, _Episode()).turns, self.episodes.rewards(row, self.reason(row))
            for index, reward in enumerate(rewards if turns else ()):
                rewards_G[turns[min(index, len(turns) - 1)][1] - 1] += reward
        return rewards_RG


def last_turns(responses_BG: Tensor, actions_BG: Tensor) -> Tensor:
    """Returns the last turn of each episode, [B, G] padded with -1: what reward functions get as the response.

    actions_BG: not 0 where a token was drawn.
    """
    turns_BG = torch.full_like(responses_BG, -1)
    for turn_G, tokens_G, drawn_G in zip(turns_BG, responses_BG, actions_BG > 0, strict=True):
        end = max(torch.nonzero(drawn_G).flatten().tolist(), default=-1) + 1
        begin = max(torch.nonzero(~drawn_G[:end]).flatten().tolist(), default=-1) + 1
        turn_G[: end - begin] = tokens_G[begin:end]
    return turns_BG
