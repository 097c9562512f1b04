"""The episodes of one generate call: what the model draws goes to the environments, and their answers come back.

The engine says with `drew` what a row drew when it ended a turn, and asks `answers` for the tokens to go on with. Each
row is a generator that yields what it asks its worker next, so that rows wait for one another nowhere. An environment
that raises, or whose worker ends, is made anew and brought to where it was by the earlier calls. If several calls ran
in a worker that ended, any of them may have ended it; so the last try of each runs alone.
"""

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from rlhf_spmd.errors import UserError
from rlhf_spmd.files import output
from rlhf_spmd.model.texts.tool_calls import Call
from rlhf_spmd.runtime.environments.native import Opening, Step
from rlhf_spmd.runtime.environments.renderer import Renderer
from rlhf_spmd.runtime.environments.rows import EpisodeState, Limits, Row, Work, id_of, seed_of
from rlhf_spmd.runtime.generation.episodes import Answer
from rlhf_spmd.runtime.workers.pool import WorkerPool

MOST_TRIES = 3  # with a fresh environment, after the first one broke or was lost
COMPLETED, TOOL_STOPPED, TIMEOUT = "completed", "tool_stopped", "rollout_timeout"
DROPPED = "dropped_episodes"  # in the log


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
        self.seed, self.iteration, self.name = seed, iteration, name
        self.states = [
            EpisodeState(row, renderer, workers.new_key()) for row, renderer in zip(rows, renderers, strict=True)
        ]
        self.dropped: set[int] = set()  # groups
        self._tickets: dict[int, int] = {}  # of questions -> row
        self._ready: list[Answer] = []

    # ---- the engine's side ------------------------------------------------------------------------------------------

    def openings(self) -> list[list[int]]:
        """Returns the tokens of each prompt, as its environment opens it."""
        for number, state in enumerate(self.states):
            if not state.renderer.environment.is_stateless:
                self._go_on(number, self._open(number, state))
        while self._tickets:
            self._take_answers(1.0)
        return [
            state.renderer.prompt_ids(state.row.where, state.row.text, state.row.messages, state.opening or Opening())
            for state in self.states
        ]

    def drew(self, row: int, token_ids: list[int]) -> None:
        """Notes that the model ended a turn of this row with these ids, the one that ends the turn included, if it drew
        one."""
        state = self.states[row]
        assert state.work is None and not state.is_reported, "a row draws after its turn has been answered"
        if not state.turn and self.limits.episode_s:
            state.until_s = time.monotonic() + self.limits.episode_s
        state.turn += 1
        if state.reason:  # it broke before it began
            self._report(row, state, state.reason)
        else:
            self._go_on(row, self._turn(row, state, token_ids))

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
        if not state.reason and state.work is None:
            state.is_reported = True
            self._go_on(row, self._ended(row, state, reason))
        while state.work is not None:
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
        states, num = self.states, len(self.states)
        counted = {
            "tool_calls": (sum(state.num_calls for state in states), num),
            "tool_failures": (sum(state.num_failures for state in states), num),
            "tool_timeouts": (sum(state.num_timeouts for state in states), num),
        }
        if self.on_failure != "drop_group" and not self.dropped:
            return counted
        dropped = [(state.renderer.environment.key, self.is_dropped(row)) for row, state in enumerate(states)]
        counted[DROPPED] = (sum(is_dropped for _, is_dropped in dropped), num)
        for key in dict.fromkeys(key for key, _ in dropped if key):
            of_key = [is_dropped for name, is_dropped in dropped if name == key]
            counted[f"{DROPPED}/{key}"] = (sum(of_key), len(of_key))
        return counted

    def seconds(self) -> list[float]:
        """Returns the seconds of each answer."""
        return [answer_s for state in self.states for answer_s in state.seconds]

    @property
    def is_exact(self) -> bool:
        """Whether no clock had a say."""
        return not any(state.num_timeouts or state.reason == TIMEOUT for state in self.states)

    # ---- rows that wait ---------------------------------------------------------------------------------------------

    def _go_on(self, number: int, work: Work | None, answer: Mapping[str, Any] | None = None) -> None:
        """Runs a row until it asks, or is done. work: a new one; None: what waits for this answer."""
        state = self.states[number]
        state.work, state.ticket = work or state.work, 0
        assert state.work is not None
        try:
            message = next(state.work) if answer is None else state.work.send(answer)
        except StopIteration:
            state.work = None
            return
        limit_s = self.limits.tool_s
        state.ticket = self.workers.ask(
            state.key,
            message | {"limit_s": limit_s},
            timeout_s=limit_s * (len(state.made) + 2),  # of the earlier calls, too
            first=lambda: self._first(state),
            is_alone=state.num_lost >= MOST_TRIES,
        )
        self._tickets[state.ticket] = number

    def _first(self, state: EpisodeState) -> dict[str, Any]:
        """Returns what a worker needs that has had no message of an episode: its beginning, and what has happened."""
        row, key = state.row, (self.seed, self.iteration, state.row.prompt)
        start: dict[str, Any] = {"columns": dict(row.columns), "prompt": row.text, "messages": row.messages}
        start |= {"seed": seed_of(*key), "sample_seed": seed_of(*key, row.sample)}
        start["episode_id"] = id_of(self.name, *key, row.sample)
        made = [] if state.renderer.environment.is_stateless else state.made
        return {"start": start, "opening": state.opening and asdict(state.opening), "made": made}

    def _take_answers(self, wait_s: float) -> None:
        for ticket, answer in self.workers.answers(wait_s, self._tickets):
            self._go_on(self._tickets.pop(ticket), None, answer)

    def _end_late(self, waiting: Sequence[EpisodeState], now_s: float) -> None:
        """Ends those of the episodes that wait whose time is over."""
        for state in waiting:
            if now_s >= state.until_s:
                number = self._tickets.pop(state.ticket)
                self.workers.drop(state.ticket)
                state.ticket, state.work = 0, None
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

    # ---- what a row asks --------------------------------------------------------------------------------------------

    def _open(self, number: int, state: EpisodeState) -> Work:
        answer = yield from self._asked(number, state, {"do": "begin"})
        if answer is not None:
            state.opening = Opening(**answer["opening"])

    def _turn(self, number: int, state: EpisodeState, drawn: list[int]) -> Work:
        """Answers a turn."""
        renderer, limits = state.renderer, self.limits
        _, calls = renderer.parse(drawn, is_first=state.turn == 1)
        if renderer.form and not calls:
            yield from self._ended(number, state, COMPLETED)
            return
        if limits.calls and state.num_calls + len(calls) > limits.calls:
            yield from self._ended(number, state, "max_tool_calls")
            return
        steps: list[Step] = []
        asked: list[Call | None] = [*calls] or [None]
        for call in asked:
            step = yield from self._step(number, state, call, drawn)
            if step is None:  # it was dropped
                return
            state.num_failures += step.has_failed
            steps.append(step)
        state.turn_rewards.append(sum(step.reward for step in steps))
        for step in steps:
            for name, value in step.logs.items():
                state.logs[name] = state.logs.get(name, 0.0) + value
        if any(step.is_done for step in steps):
            yield from self._ended(number, state, TOOL_STOPPED)
        elif limits.turns and state.turn >= limits.turns:
            yield from self._ended(number, state, "max_turns")
        elif time.monotonic() >= state.until_s:
            self._end(number, state, TIMEOUT)
        else:
            self._ready.append(Answer(number, tuple(renderer.answer_ids(drawn, calls, steps))))

    def _step(
        self, number: int, state: EpisodeState, call: Call | None, drawn: list[int]
    ) -> Generator[dict[str, Any], Mapping[str, Any], Step | None]:
        """Returns the answer to a call, or to a turn without one; None: the episode was dropped."""
        message: dict[str, Any] = {"do": "step", "text": state.renderer.text_of(drawn)}
        if call is not None:
            state.num_calls += 1
            if call.error:
                return Step(call.error, has_failed=True)
            message = {"do": "call", "name": call.name, "arguments": call.arguments}
        began_s = time.monotonic()
        answer = yield from self._asked(number, state, message)
        if answer is None:
            return None
        state.seconds.append(time.monotonic() - began_s)
        if answer.get("timed_out"):
            state.num_timeouts += 1
            return Step(f"error: timed out after {self.limits.tool_s:g} s", has_failed=True)
        state.made.append((message, answer["step"]))
        return Step(**answer["step"])

    def _ended(self, number: int, state: EpisodeState, reason: str) -> Work:
        """Ends an episode: the engine is told at once, then its last reward is asked for."""
        if not state.renderer.environment.is_stateless:
            self._report(number, state, reason)
            answer = yield from self._asked(number, state, {"do": "reward"})
            if answer is None:
                return
            state.end_reward = answer["reward"]
        self._end(number, state, reason)

    def _asked(
        self, number: int, state: EpisodeState, message: dict[str, Any]
    ) -> Generator[dict[str, Any], Mapping[str, Any], Mapping[str, Any] | None]:
        """Asks the environment until it answers. Returns the answer; None: it broke too often, and its group is
        dropped. Raises UserError if groups are not."""
        while True:
            answer = yield message
            name = state.renderer.environment.name
            if "misused" in answer:
                raise UserError(f"{state.where}: environment {name!r}: {answer['misused']}")
            how = answer.get("broken", "")
            if answer.get("timed_out") and message["do"] not in ("call", "step"):
                how = "it blocks its worker process, and its time is over"
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
                self._give_up(number, state, f"the environment {name} broke {num} times", how)
                return None

    def _give_up(self, number: int, state: EpisodeState, what: str, how: str) -> None:
        if self.on_failure != "drop_group":
            raise UserError(
                f"{state.where}: {what}: fix it, let a tool return a text about what is wrong, or leave such groups "
                f"out (episode.on_failure=drop_group)\n{how}"
            )
        output.say(f"{output.NOTE}{what}, so the group of an episode is dropped\n{how}")
        self.dropped.add(state.row.group)
        self._end(number, state, TOOL_STOPPED)
