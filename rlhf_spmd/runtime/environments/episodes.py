"""The episodes of one generate call: what the model draws goes to the environments, and their answers come back.

The engine says with `drew` what a row drew when it ended a turn, and asks `answers` for the tokens to go on with. Each
row is a generator that yields what it asks its worker next, so that rows wait for one another nowhere. An environment
that raises, or whose worker ends, is made anew and brought to where it was by the earlier calls. If several calls ran
in a worker that ended, any of them may have ended it; so the last try of each runs alone.

An episode of an agent may have several rows, which are neighbours. Each asks the same object of the worker: first for
the request that opens the row, whose key gives it random numbers of its own, then for those that extend it. If a row
hits a limit of the engine, the object is told at once, because the agent may go on in the other rows.
"""

import hashlib
import json
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict
from typing import Any

from rlhf_spmd.config.options import Episode
from rlhf_spmd.errors import UserError
from rlhf_spmd.files import output
from rlhf_spmd.model.texts.tool_calls import Call
from rlhf_spmd.runtime.environments.episode_states import EpisodeState, Question, Reply, Row, Work
from rlhf_spmd.runtime.environments.native import Opening, Start, Step
from rlhf_spmd.runtime.environments.renderer import Renderer
from rlhf_spmd.runtime.generation.episodes import DRAWN_OUT, TOO_LONG, Answer
from rlhf_spmd.runtime.workers.pool import WorkerPool

MOST_TRIES = 3  # with a fresh environment, after the first one broke or was lost
COMPLETED, TOOL_STOPPED, TIMEOUT = "completed", "tool_stopped", "rollout_timeout"
DROPPED, CHANGED, ROWS = "dropped_episodes", "agent_mismatches", "episode_rows"  # in the log
REWARD = {"do": "reward"}  # the last question of an episode
GONE = {"gone": True}  # the answer of a worker without the episode


class Dropped(Exception):
    """An environment broke too often, and the group of its row is dropped."""


class Episodes:
    """The outside of the engine for some rows. Raises UserError for environments that break."""

    def __init__(
        self,
        rows: Sequence[Row],
        renderers: Sequence[Renderer],
        workers: WorkerPool,
        options: Episode,
        *,
        seed: int,
        iteration: int,
        name: str = "",
        max_prompt: int = 0,
    ):
        """
        renderers: of each row.
        name: of the run and the call, for the ids of episodes.
        max_prompt: tokens of the prompt of a row that an agent opens, if episodes have several.
        """
        self.workers, self.options, self.max_prompt = workers, options, max_prompt
        self.num_rows = num_rows = options.rows  # of an episode
        self.states: list[EpisodeState] = []
        for number, (row, renderer) in enumerate(zip(rows, renderers, strict=True)):
            if number % num_rows == 0:
                key, sample = (seed, iteration, row.prompt), row.sample // num_rows
                seeds = seed_of(*key), seed_of(*key, sample)
                start = Start(dict(row.columns), row.text, row.messages, *seeds, id_of(name, *key, sample))
                worker_key = workers.new_key()
            state = EpisodeState(row, renderer, worker_key, start, number, draws=num_rows == 1)
            state.lead = self.states[-(number % num_rows)] if number % num_rows else state
            self.states.append(state)
        self.dropped: set[int] = set()  # groups
        self._tickets: dict[int, EpisodeState] = {}  # of questions
        self._ready: list[Answer] = []

    # ---- the engine's side ------------------------------------------------------------------------------------------

    def openings(self) -> list[list[int]]:
        """Returns the tokens of each prompt, as its environment opens it; none if rows are opened by answers, of which
        those of the first rows have come."""
        for state in self.states:
            state.work = self._play(state)
            self._go_on(state)
            state.busy_s = math.inf if state.draws else time.monotonic()
        while any(state.ticket for state in self.states[:: self.num_rows]):
            self._take_answers(1.0)
            self._end_late(time.monotonic())
        self._ready.sort(key=lambda answer: answer.row)
        return [self._opened(state) if self.num_rows == 1 else [] for state in self.states]

    def _opened(self, state: EpisodeState) -> list[int]:
        row, opening = state.row, Opening(**state.made[0][1]["opening"]) if state.made else Opening()
        if state.is_of_agent:
            assert state.renderer.with_tools is not None
            state.renderer = state.renderer.with_tools(json.dumps(opening.tools))
        token_ids = state.renderer.prompt_ids(f"prompt {row.prompt} of the data set", row.text, row.messages, opening)
        state.num_tokens = len(token_ids)
        return token_ids

    def drew(self, row: int, token_ids: list[int]) -> None:
        """Notes that the model ended a turn of this row with these ids, the one that ends the turn included, if it drew
        one."""
        state = self.states[row]
        assert not state.ticket and not state.is_reported, "a row draws after its turn has been answered"
        if self.options.timeout_s and state.lead.until_s == math.inf:
            state.lead.until_s = time.monotonic() + self.options.timeout_s
        state.turn += 1
        self._note_drawing(state, is_drawing=False)
        if state.reason:  # it broke before it began, or while it drew
            self._report(state, state.reason)
        else:
            self._go_on(state, token_ids)

    def cut(self, row: int, token_ids: list[int]) -> None:
        """Notes what the model drew in the turn in which a limit ended a row."""
        state = self.states[row]
        state.cut = token_ids
        if self.num_rows > 1:
            state.is_reported = True
            self._note_drawing(state, is_drawing=False)
            if not state.reason:
                self._go_on(state, DRAWN_OUT)  # or another limit

    def answers(self, wait_s: float) -> list[Answer]:
        """Returns the answers that have come back since; waits for so long at most if nothing has."""
        until_s = time.monotonic() + wait_s
        is_over = False
        while not is_over:
            now_s = time.monotonic()
            least_s = self._end_late(now_s)  # also where answers are there already
            if not self._ready and self._tickets:
                self._take_answers(max(0.0, min(until_s, least_s) - now_s))
            is_over = bool(self._ready) or not self._tickets or now_s >= until_s
        ready, self._ready = self._ready, []
        return ready

    def rewards(self, row: int, reason: str) -> list[float]:
        """Returns the reward of each turn of a row that has ended: one for each call of `drew`, with the episode's own
        reward in the last. reason: why it ended, which of a limit of the engine only the engine knows."""
        state = self.states[row]
        if not state.reason and not state.ticket:
            state.is_reported = True
            self._go_on(state, reason)
        while state.ticket:
            self._take_answers(1.0)
            self._end_late(time.monotonic())
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
        num = len(self.states) // self.num_rows
        counted = {
            "tool_calls": (sum(state.num_calls for state in self.states), num),
            "tool_failures": (sum(state.num_failures for state in self.states), num),
            "tool_timeouts": (sum(state.num_timeouts for state in self.states), num),
        }
        if any(state.is_of_agent for state in self.states):
            counted[CHANGED] = (sum(state.num_changed for state in self.states), num)
        if self.num_rows > 1:
            counted[ROWS] = (sum(state.turn > 0 or bool(state.cut) for state in self.states), num)
        for state in self.states if self.options.on_failure == "drop_group" else ():
            key = state.renderer.environment.key
            for name in (DROPPED, f"{DROPPED}/{key}") if key else (DROPPED,):
                dropped, of = counted.get(name, (0, 0))
                counted[name] = dropped + (state.row.group in self.dropped), of + 1
        return counted

    def seconds(self) -> list[float]:
        """Returns the seconds of each answer."""
        return [answer_s for state in self.states for answer_s in state.seconds]

    # ---- rows that wait ---------------------------------------------------------------------------------------------

    def _go_on(self, state: EpisodeState, value: Any = None) -> None:
        """Runs a row until it asks its worker, waits for the model, or is over. value: what it waits for."""
        state.ticket = 0
        try:
            message = state.work.send(value)
        except StopIteration:
            return
        if message is not None:
            episode = {"environment": state.renderer.environment.key, "episode_id": state.start.episode_id}
            is_single = self.num_rows == 1  # else the question may wait while the model draws for other rows
            limit_s = self.options.tool_timeout_s if is_single else 0.0
            message = message | episode | {"limit_s": limit_s, "row": state.number - state.lead.number}
            if message["do"] == "begin":
                others = self._rows_of(state)
                message["opened"] = {other.row_key: index for index, other in enumerate(others) if other.row_key}
            is_alone = is_single and state.num_lost >= MOST_TRIES
            state.asked = state.lead.key
            state.ticket = self.workers.ask(state.asked, message, timeout_s=limit_s, is_alone=is_alone)
            self._tickets[state.ticket] = state

    def _take_answers(self, wait_s: float) -> None:
        for ticket, answer in self.workers.answers(wait_s, self._tickets):
            self._go_on(self._tickets.pop(ticket), answer)

    def _rows_of(self, state: EpisodeState) -> list[EpisodeState]:
        """Returns all rows of the episode of a row."""
        return self.states[state.lead.number : state.lead.number + self.num_rows]

    def _end_late(self, now_s: float) -> float:
        """Ends the episodes whose time is over. Returns when that of the next one is."""
        least_s, limit_s = math.inf, self.options.tool_timeout_s if self.num_rows > 1 else 0.0
        for state in self.states:
            until_s = math.inf if state.is_reported else state.lead.until_s
            until_s = min(until_s, state.lead.busy_s + (limit_s or math.inf))
            if not state.ticket or now_s < until_s:
                least_s = min(least_s, until_s) if state.ticket else least_s
                continue
            state.lead.num_timeouts += now_s < state.lead.until_s
            for other in self._rows_of(state):
                if other.ticket:
                    self._tickets.pop(other.ticket)
                    self.workers.drop(other.ticket)
                    other.ticket = 0
                if not other.reason:
                    self._end(other, TIMEOUT)
        if limit_s:
            self.workers.beat()  # whatever the agents do, their time is limited
        return least_s

    def _note_drawing(self, state: EpisodeState, *, is_drawing: bool) -> None:
        """Notes whether the model draws for a row, and since when it draws for none of its episode."""
        state.draws, lead, now_s = is_drawing, state.lead, time.monotonic()
        draws = any(other.draws for other in self._rows_of(state))
        if self.num_rows > 1 and draws and lead.busy_s < math.inf:
            lead.seconds.append(now_s - lead.busy_s)
        lead.busy_s = math.inf if draws else min(lead.busy_s, now_s)

    def _end(self, state: EpisodeState, reason: str) -> None:
        state.reason = reason
        if all(other.reason for other in self._rows_of(state)):
            self.workers.release(state.lead.key)
        self._report(state, reason)

    def _report(self, state: EpisodeState, reason: str) -> None:
        """Tells the engine once that an episode is over; not while it draws."""
        if not state.draws and not state.is_reported:
            state.is_reported = True
            self._ready.append(Answer(state.number, None, reason))

    # ---- a row ------------------------------------------------------------------------------------------------------

    def _play(self, state: EpisodeState) -> Work:
        """Plays an episode. It waits for what the model drew in a turn, or for the limit of the engine that ended it;
        the engine is told of the end at once, then the last reward is asked for."""
        has_state = not state.renderer.environment.is_stateless
        try:
            if has_state:
                begin = {"do": "begin", "start": asdict(state.start)}
                state.made.append((begin, (yield from self._asked(state, begin))))
            reason = self._begun(state) if self.num_rows > 1 else ""
            while not reason:
                drawn = yield None
                reason = drawn if isinstance(drawn, str) else (yield from self._turn(state, drawn))
            is_used = self.num_rows == 1 or bool(state.row_key)
            if has_state and is_used and reason != TIMEOUT:
                self._report(state, reason)
                last = REWARD | {"cut": self._said(state, state.cut, state.turn + 1)} if state.cut else REWARD
                state.end_reward = (yield from self._asked(state, last))["reward"]
        except Dropped:
            reason = TOOL_STOPPED
        self._end(state, reason)

    def _begun(self, state: EpisodeState) -> str:
        """Opens a row that an agent asks for. Returns why the row is over; empty: it is not."""
        state.row_key = state.made[0][1]["opening"]["key"]
        if not state.row_key:
            return COMPLETED
        token_ids = self._opened(state)
        if len(token_ids) > self.max_prompt:
            if state is state.lead:
                raise UserError(
                    f"{state.where}: the agent opens its first row with {len(token_ids)} tokens; raise "
                    f"data.max_prompt={self.max_prompt}"
                )
            return TOO_LONG
        self._note_drawing(state, is_drawing=True)
        stream = seed_of(state.lead.row.sample // self.num_rows, *state.row_key.encode())
        self._ready.append(Answer(state.number, tuple(token_ids), stream=stream))
        return ""

    def _turn(self, state: EpisodeState, drawn: list[int]) -> Generator[Question, Reply, str]:
        """Answers a turn. Returns why the episode ends; empty: it does not."""
        renderer, options = state.renderer, self.options
        if state.is_of_agent:
            _, calls = renderer.said(drawn, state.turn)
        else:
            _, calls = renderer.parse(drawn, is_first=state.turn == 1)
        if renderer.form and not calls and not state.is_of_agent:
            return COMPLETED
        if options.max_calls and state.num_calls + len(calls) > options.max_calls:
            return "max_tool_calls"
        steps: list[Step] = []
        asked: list[Call | None] = [None] if state.is_of_agent or not calls else [*calls]
        for call in asked:
            step = yield from self._step(state, call, drawn)
            state.num_failures += step.has_failed
            state.num_changed += step.num_changed
            steps.append(step)
        state.turn_rewards.append(sum(step.reward for step in steps))
        if any(step.is_done for step in steps):
            return TOOL_STOPPED
        if options.max_turns and state.turn >= options.max_turns:
            return "max_turns"
        if time.monotonic() >= state.lead.until_s or (state.is_of_agent and state.num_timeouts):
            return TIMEOUT
        token_ids = renderer.answer_ids(drawn, calls, steps)
        state.num_tokens += len(drawn) + len(token_ids)
        self._note_drawing(state, is_drawing=True)
        self._ready.append(Answer(state.number, tuple(token_ids)))
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
        if self.num_rows == 1:
            state.seconds.append(time.monotonic() - began_s)
        if "timed_out" in answer:
            state.num_timeouts += 1
            return Step(f"error: timed out after {self.options.tool_timeout_s:g} s", has_failed=True)
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
            if max(state.lead.num_lost, state.lead.num_broken) > MOST_TRIES:  # another row of the episode noticed
                raise Dropped
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
                action = "be made anew" if is_again else message["do"]
                how = f"it took longer than {self.options.tool_timeout_s:g} s to {action}"
            how = f"its worker process {answer['lost']}" if "lost" in answer else how
            if not how:
                return answer
            lead = state.lead
            if state.asked != lead.key:  # another row of the episode has counted it
                continue
            self.workers.release(lead.key)
            lead.key = self.workers.new_key()
            lead.num_lost += "lost" in answer
            lead.num_broken += "lost" not in answer
            num = max(lead.num_lost, lead.num_broken)
            if num > MOST_TRIES:
                for other in self.states:
                    if other.lead is lead and other.draws:
                        other.reason = TOOL_STOPPED
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
        if self.options.on_failure != "drop_group":
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
