"""The rows of a generate call with environments: what they begin with, where each one is, and what it came to."""

import hashlib
import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_spmd.runtime.environments.native import Message, Opening
from rlhf_spmd.runtime.environments.renderer import Renderer

Work = Generator[dict[str, Any], Mapping[str, Any], None]  # messages to a worker, and its answers


@dataclass(frozen=True, slots=True)
class Row:
    """A row to be drawn.

    prompt: its number in the iteration.
    sample: its number among the rows of the prompt.
    group: number of the rows that are dropped together.
    text, messages: of the prompt.
    where: of the row in the data, for messages.
    """

    prompt: int
    sample: int
    group: int
    columns: Mapping[str, Any]
    text: str
    messages: list[Message] | None
    where: str = "the data set"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an episode; 0: none.

    calls: of tools.
    tool_s: seconds of a call.
    episode_s: of a whole episode.
    """

    turns: int = 0
    calls: int = 0
    tool_s: float = 0.0
    episode_s: float = 0.0


@dataclass(slots=True)
class EpisodeState:
    """A row under way.

    key: its number among all of the workers.
    made: the calls so far that were answered in time, with their answers.
    num_broken, num_lost: how often its environment raised, and how often its worker ended.
    reason: why it ended; empty: it has not.
    """

    row: Row
    renderer: Renderer
    key: int
    work: Work | None = None
    ticket: int = 0  # of the question that waits; 0: none
    until_s: float = math.inf  # on the clock
    turn: int = 0
    opening: Opening | None = None
    made: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    end_reward: float = 0.0
    num_calls: int = 0
    num_failures: int = 0
    num_timeouts: int = 0
    num_broken: int = 0
    num_lost: int = 0
    seconds: list[float] = field(default_factory=list)
    logs: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    is_reported: bool = False  # the engine knows that it is over

    @property
    def where(self) -> str:
        return f"prompt {self.row.prompt}, sample {self.row.sample}, turn {self.turn}"


def seed_of(*key: int) -> int:
    """Returns a number below 2**31 for random generators, the same on any machine."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], "big") >> 1


def id_of(*key: str | int) -> str:
    """Returns a name of 16 hexadecimal digits, the same on any machine."""
    return hashlib.sha256(repr(key).encode()).hexdigest()[:16]
