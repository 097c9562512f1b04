"""What a rank knows of the episodes of a generate call: their rows, their limits, and how far they are."""

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_spmd.runtime.environments.native import Message, Start
from rlhf_spmd.runtime.environments.renderer import Renderer

Question = dict[str, Any]  # to a worker
Reply = Mapping[str, Any]  # from it
Work = Generator[Question | None, Any, None]


@dataclass(frozen=True, slots=True)
class Row:
    """A row to be drawn.

    prompt: its number in the iteration.
    sample: its number among the rows of the prompt.
    group: number of the rows that are dropped together.
    text, messages: of the prompt.
    """

    prompt: int
    sample: int
    group: int
    columns: Mapping[str, Any]
    text: str
    messages: list[Message] | None


@dataclass(slots=True)
class EpisodeState:
    """A row under way.

    number: of its row among those of the call.
    key: the number of its episode among all of the workers.
    start: what its environment begins with.
    lead: the first row of its episode, which counts for all of them.
    draws: the model has something to draw for it.
    asked: the key of the question that waits.
    busy_s: since when no row of its episode draws; infinite: one does.
    work: yields questions for its worker and, between turns, None.
    ticket: of the question that waits; 0: none.
    until_s: when its time is over.
    num_tokens: that the model has seen and drawn so far.
    cut: what it drew in the turn that a limit ended.
    made: the calls so far that were answered in time, with their answers; the first one begins it.
    num_broken, num_lost: how often its environment raised, and how often its worker ended.
    reason: why it ended; empty: it has not.
    is_reported: the engine knows that it is over.
    row_key: of a row that an agent has opened.
    """

    row: Row
    renderer: Renderer
    key: int
    start: Start
    number: int
    lead: "EpisodeState" = field(init=False)
    work: Work = field(init=False)
    draws: bool = True
    ticket: int = 0
    asked: int = 0
    until_s: float = math.inf
    busy_s: float = math.inf
    turn: int = 0
    num_tokens: int = 0
    cut: list[int] = field(default_factory=list)
    made: list[tuple[Question, Reply]] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    end_reward: float = 0.0
    num_calls: int = 0
    num_failures: int = 0
    num_timeouts: int = 0
    num_changed: int = 0
    num_broken: int = 0
    num_lost: int = 0
    seconds: list[float] = field(default_factory=list)
    reason: str = ""
    is_reported: bool = False
    row_key: str = ""

    @property
    def is_of_agent(self) -> bool:
        return self.renderer.environment.speaks == "agent"

    @property
    def where(self) -> str:
        return f"prompt {self.row.prompt}, sample {self.row.sample}, turn {self.turn}"
