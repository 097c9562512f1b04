"""The episodes of one generate call: what the model draws goes to the environments, and their answers come back.

The engine says with `drew` what a row drew when it ended a turn, and asks `answers` for the tokens to go on with. Each
row is a generator that yields what it asks its worker next, so that rows wait for one another nowhere. An environment
that raises, or whose worker ends, is made anew and brought to where it was by the earlier calls. If several calls ran
in a worker that ended, any of them may have ended it; so the last try of each runs alone.
"""

import hashlib
import json
import math
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rlhf_spmd.errors import UserError
from rlhf_spmd.files import output
from rlhf_spmd.model.texts.tool_calls import Call
from rlhf_spmd.runtime.environments.native import Message, Opening, Start, Step
from rlhf_spmd.runtime.environments.renderer import Renderer
from rlhf_spmd.runtime.generation.episodes import Answer
from rlhf_spmd.runtime.workers.pool import WorkerPool

MOST_TRIES = 3  # with a fresh environment, after the first one broke or was lost
COMPLETED, TOOL_STOPPED, TIMEOUT = "completed", "tool_stopped", "rollout_timeout"
DROPPED, CHANGED = "dropped_episodes", "agent_mismatches"  # in the log
REWARD = {"do": "reward"}  # the last question of an episode
GONE = {"gone": True}  # the answer of a worker without the episode

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
    start: what its environment begins with.
    work: yields questions for its worker and, between turns, None.
    ticket: of the question that waits; 0: none.
    until_s: when its time is over.
    num_tokens: that the model has seen and drawn so far.
    cut: what it drew in the turn that a limit ended.
    made: the calls so far that were answered in time, with their answers; the first one begins it.
    num_broken, num_lost: how often its environment raised, and how often its worker ended.
    reason: why it ended; empty: it has not.
    is_reported: the engine knows that it is over.
    """

    row: Row
    renderer: Renderer
    key: int
    start: Start
    work: Work = field(init=False)
    ticket: int = 0
    until_s: float = math.inf
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

    @property
    def is_of_agent(self) -> bool:
        return self.renderer.environment.speaks == "agent"

    @property
    def where(self) -> str:
        return f"prompt {self.row.prompt}, sample {self.row.sample}, turn {self.turn}"


class Dropped(Exception):
    """An environment broke too often, and the group of its row is dropped."""


class Episodes:
    """The outside of the engine for some rows. Raises UserError for environments that break."""

    def __init__(
        self,
        rows: Sequence[Row],
        renderers: Sequence[Renderer],
        workers: WorkerPool,
        limits: Limits,
        *,
        seed: int,
        iteration: int,
        name: str = "",
        on_failure: Literal["stop", "drop_group"] = "stop",
    ):
        """
        renderers: of each row.
        name: of the run and the call, for the ids of episodes.
        """
        self.workers, self.limits, self.on_failure = workers, limits, on_failure
        self.states: list[EpisodeState] = []
        for row, renderer in zip(rows, renderers, strict=True):
            key = (seed, iteration, row.prompt)
            seeds = seed_of(*key), seed_of(*key, row.sample)
            start = Start(dict(row.columns), row.text, row.messages, *seeds, id_of(name, *key, row.sample))
            self.states.append(EpisodeState(row, renderer, workers.new_key(), start))
        self.dropped: set[int] = set()  # groups
        self._tickets: dict[int, int] = {}  # of questions -> row
        self._ready: list[Answer] = []

    # ---- the engine's side ------------------------------------------------------------------------------------------

    def openings(self) -> list[list[int]]:
        """Returns the tokens of each prompt, as its environment opens it."""
        for number, state in enumerate(self.states):
            state.work = self._play(number, state)
            self._go_on(number)
        while self._tickets:
            self._take_answers(1.0)
        return [self._opened(state) for state in self.states]

    def _opened(self, state: EpisodeState) -> list[int]:
        row, opening = state.row, Opening(**state.made[0][1]["opening"]) if state.made else Opening()
        if state.is_of_agent:
            assert state.renderer.with_tools is not None
            state.renderer = state.renderer.with_tools(json.dumps(opening.tools))
        token_ids = state.renderer.prompt_ids(row.where, row.text, row.messages, opening)
        state.num_tokens = len(token_ids)
        return token_ids

    def drew(self, row: int, token_ids: list[int]) -> None:
        """Notes that the model ended a turn of this row with these ids, the one that ends the turn included, if it drew
        one."""
        state = self.states[row]
        assert not state.ticket and not state.is_reported, "a row draws after its turn has been answered"
        if not state.turn and self.limits.episode_s:
            state.until_s = time.monotonic() + self.limits.episode_s
        state.turn += 1
        if state.reason:  # it broke before it began
            self._report(row, state, state.reason)
        else:
            self._go_on(row, token_ids)

    def cut(self, row: int, token_ids: list[int]) -> None:
        """Notes what the model drew in the turn in which a limit ended a row."""
        self.states[row].cut = token_ids

    def answers(self, wait_s: float) -> list[Answer]:
        """Returns the answers that have come back since; waits for so long at most if nothing has."""
        until_s = time.monotonic() + wait_s
        is_over = False
        while not is_over:
            now_s = time.monotonic()
            waiting = [state for state in self.states if state.ticket and not state.is_reported]
            self._end_late(waiting, now_s)
            is_over = bool(self._ready) or not self._tickets or now_s >= until_s
            if not self._ready and self._tickets:
                self._take_answers(max(0.0, min([until_s, *(state.until_s for state in waiting)]) - now_s))
                is_over = is_over or bool(self._ready)
        ready, self._ready = self._ready, []
        return ready

    def rewards(self, row: int, reason: str) -> list[float]:
        """Returns the reward of each turn of a row that has ended: one for each call of `drew`, with the episode's own
        reward in the last. reason: why it ended, which of a limit of the engine only the engine knows."""
        state = self.states[row]
        if not state.reason and not state.ticket:
            state.is_reported = True
            self._go_on(row, reason)
        while state.ticket:
            self._take_answers(1.0)
        rewards = [*state.turn_rewards, *[0.0] * (max(state.turn, 1) - len(state.turn_rewards))]
        rewards[-1] += state.end_reward
        return rewards

    def is_dropped(self, row: int) -> bool:
        """Returns whether an environment of the row's group broke too often; final once the group's rewards have been
        read."""
        return self.states[row].row.group in self.dropped

    def counts(self) -> dict[str, tuple[int, int]]:
        """Returns tool calls, what became of them, and dropped episodes if there may be any: a number, and of how many
        episodes. Dropped ones are counted for each of several environments, too."""
        num = len(self.states)
        counted = {
            "tool_calls": (sum(state.num_calls for state in self.states), num),
            "tool_failures": (sum(state.num_failures for state in self.states), num),
            "tool_timeouts": (sum(state.num_timeouts for state in self.states), num),
        }
        if any(state.is_of_agent for state in self.states):
            counted[CHANGED] = (sum(state.num_changed for state in self.states), num)
        for state in self.states if self.on_failure == "drop_group" else ():
            key = state.renderer.environment.key
            for name in (DROPPED, f"{DROPPED}/{key}") if key else (DROPPED,):
                dropped, of = counted.get(name, (0, 0))
                counted[name] = dropped + (state.row.group in self.dropped), of + 1
        return counted

    def seconds(self) -> list[float]:
        """Returns the seconds of each answer."""
        return [answer_s for state in self.states for answer_s in state.seconds]

    # ---- rows that wait ---------------------------------------------------------------------------------------------

    def _go_on(self, number: int, value: Any = None) -> None:
        """Runs a row until it asks its worker, waits for the model, or is over. value: what it waits for."""
        state = self.states[number]
        state.ticket = 0
        try:
            message = state.work.send(value)
        except StopIteration:
            return
        if message is not None:
            episode = {"environment": state.renderer.environment.key, "episode_id": state.start.episode_id}
            limit_s = self.limits.tool_s
            message = message | episode | {"limit_s": limit_s}
            is_alone = state.num_lost >= MOST_TRIES
            state.ticket = self.workers.ask(state.key, message, timeout_s=limit_s, is_alone=is_alone)
            self._tickets[state.ticket] = number

    def _take_answers(self, wait_s: float) -> None:
        for ticket, answer in self.workers.answers(wait_s, self._tickets):
            self._go_on(self._tickets.pop(ticket), answer)

    def _end_late(self, waiting: Sequence[EpisodeState], now_s: float) -> None:
        """Ends those of the episodes that wait whose time is over."""
        for state in waiting:
            if now_s >= state.until_s:
                number = self._tickets.pop(state.ticket)
                self.workers.drop(state.ticket)
                state.ticket = 0
                self._end(number, state, TIMEOUT)

    def _end(self, number: int, state: EpisodeState, reason: str) -> None:
        state.reason = reason
        self.workers.release(state.key)
        self._report(number, state, reason)

    def _report(self, number: int, state: EpisodeState, reason: str) -> None:
        """Tells the engine once that an episode is over; not before it has drawn anything."""
        if state.turn and not state.is_reported:
            state.is_reported = True
            self._ready.append(Answer(number, None, reason))

    # ---- a row ------------------------------------------------------------------------------------------------------

    def _play(self, number: int, state: EpisodeState) -> Work:
        """Plays an episode. It waits for what the model drew in a turn, or for the limit of the engine that ended it;
        the engine is told of the end at once, then the last reward is asked for."""
        has_state = not state.renderer.environment.is_stateless
        try:
            if has_state:
                begin = {"do": "begin", "start": asdict(state.start)}
                state.made.append((begin, (yield from self._asked(state, begin))))
            reason = ""
            while not reason:
                drawn = yield None
                reason = drawn if isinstance(drawn, str) else (yield from self._turn(number, state, drawn))
            if has_state and reason != TIMEOUT:
                self._report(number, state, reason)
                last = REWARD | {"cut": self._said(state, state.cut, state.turn + 1)} if state.cut else REWARD
                state.end_reward = (yield from self._asked(state, last))["reward"]
        except Dropped:
            reason = TOOL_STOPPED
        self._end(number, state, reason)

    def _turn(self, number: int, state: EpisodeState, drawn: list[int]) -> Generator[Question, Reply, str]:
        """Answers a turn. Returns why the episode ends; empty: it does not."""
        renderer, limits = state.renderer, self.limits
        if state.is_of_agent:
            _, calls = renderer.said(drawn, state.turn)
        else:
            _, calls = renderer.parse(drawn, is_first=state.turn == 1)
        if renderer.form and not calls and not state.is_of_agent:
            return COMPLETED
        if limits.calls and state.num_calls + len(calls) > limits.calls:
            return "max_tool_calls"
        steps: list[Step] = []
        asked: list[Call | None] = [None] if state.is_of_agent or not calls else [*calls]
        for call in asked:
            step = yield from self._step(state, call, drawn)
            state.num_failures += step.has_failed
            steps.append(step)
        state.turn_rewards.append(sum(step.reward for step in steps))
        if any(step.is_done for step in steps):
            return TOOL_STOPPED
        if limits.turns and state.turn >= limits.turns:
            return "max_turns"
        if time.monotonic() >= state.until_s or (state.is_of_agent and state.num_timeouts):
            return TIMEOUT
        token_ids = renderer.answer_ids(drawn, calls, steps)
        state.num_tokens += len(drawn) + len(token_ids)
        self._ready.append(Answer(number, tuple(token_ids)))
        return ""

    def _step(self, state: EpisodeState, call: Call | None, drawn: list[int]) -> Generator[Question, Reply, Step]:
        """Returns the answer to a call, or to a turn without one."""
        message: Question = {"do": "step", "text": self._said(state, drawn, state.turn)}
        if call is not None:
            state.num_calls += 1
            if call.error:
                return Step(call.error, has_failed=True)
            message = {"do": "call", "name": call.name, "arguments": call.arguments}
        if state.is_of_agent:
            state.num_calls += len(message["text"]["calls"])
        began_s = time.monotonic()
        answer = yield from self._asked(state, message)
        state.seconds.append(time.monotonic() - began_s)
        if "timed_out" in answer:
            state.num_timeouts += 1
            return Step(f"error: timed out after {self.limits.tool_s:g} s", has_failed=True)
        state.made.append((message, answer))
        return Step(**answer["step"])

    def _said(self, state: EpisodeState, drawn: list[int], turn: int) -> Any:
        """Returns what a turn says, as environments get it."""
        if not state.is_of_agent:
            return state.renderer.text_of(drawn)
        words, calls = state.renderer.said(drawn, turn)
        reason = "length" if state.cut else "tool_calls" if calls else "stop"
        return {
            "words": words.strip(),
            "calls": [{"id": call.number, "name": call.name, "arguments": call.arguments} for call in calls],
            "finish_reason": reason,
            "num_prompt": state.num_tokens,
            "num_drawn": len(drawn),
        }

    def _asked(self, state: EpisodeState, message: Question) -> Generator[Question, Reply, Reply]:
        """Asks the environment until it answers, and returns the answer. Raises Dropped if it broke too often, or
        UserError if groups are not dropped."""
        while True:
            answer = yield message
            is_again = "gone" in answer
            if is_again:
                answer = yield from self._made_anew(state)
            if "gone" in answer:
                continue
            name = state.renderer.environment.name
            if "misused" in answer:
                raise UserError(f"{state.where}: environment {name!r}: {answer['misused']}")
            how = answer.get("broken", "")
            if "timed_out" in answer and (is_again or message["do"] not in ("call", "step")):
                how = f"it took longer than {self.limits.tool_s:g} s to {'be made anew' if is_again else message['do']}"
            if "lost" in answer:
                state.num_lost += 1
                how = f"its worker process {answer['lost']}"
            elif how:
                self.workers.release(state.key)
                state.num_broken += 1
            else:
                return answer
            num = max(state.num_lost, state.num_broken)
            if num > MOST_TRIES:
                self._drop(state, f"the environment {name} broke {num} times", how)

    def _made_anew(self, state: EpisodeState) -> Generator[Question, Reply, Reply]:
        """Brings a new environment to where the lost one was. Returns the answer of a call that failed, or else GONE:
        the question is to be asked again. Raises UserError if a call is answered otherwise than before."""
        for asked, before in state.made:
            now = yield asked
            if now.keys() != before.keys():
                return now
            if now != before:
                raise UserError(
                    f"{state.where}: environment {state.renderer.environment.name!r}: {asked.get('name', asked['do'])} "
                    f"gave {str(now)[:200]} where it gave {str(before)[:200]} before its object was made anew: let its "
                    "answers depend on the calls, the columns and the seeds alone"
                )
        return GONE

    def _drop(self, state: EpisodeState, what: str, how: str) -> None:
        """Drops the group of an episode and raises Dropped, or UserError where groups are not dropped."""
        if self.on_failure != "drop_group":
            raise UserError(
                f"{state.where}: {what}: fix it, let a tool return a text about what is wrong, or leave such groups "
                f"out (episode.on_failure=drop_group)\n{how}"
            )
        output.say(f"{output.NOTE}{what}, so the group of an episode is dropped\n{how}")
        self.dropped.add(state.row.group)
        raise Dropped


def seed_of(*key: int) -> int:
    """Returns a number below 2**31 for random generators, the same on any machine."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], "big") >> 1


def id_of(*key: str | int) -> str:
    """Returns a name of 16 hexadecimal digits, the same on any machine."""
    return hashlib.sha256(repr(key).encode()).hexdigest()[:16]
