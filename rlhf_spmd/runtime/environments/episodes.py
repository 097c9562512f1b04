"""The episodes of one generate call: what the model draws goes to the environments, and what they say comes back.

The engine tells `drew` what a row drew when it ended a turn, and asks `answers` for the tokens to go on with. Each row
is a generator that says what it asks its worker next, so that rows wait for one another nowhere. An answer is written
into the journal before it is used, and one that is there is not asked for: the object of an episode is made when its
first unanswered call comes, and brought to where it was by the earlier calls, whose answers must be the same.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from rlhf_spmd.errors import UserError
from rlhf_spmd.files import output
from rlhf_spmd.model.texts.tool_calls import Call
from rlhf_spmd.runtime.environments.journal import END, OPENING, Journal, Key
from rlhf_spmd.runtime.environments.kinds import Opening, Step
from rlhf_spmd.runtime.environments.rows import Asking, Life, Limits, Result, Row, seed_of
from rlhf_spmd.runtime.environments.speech import Speech
from rlhf_spmd.runtime.environments.workers import EnvironmentWorkers
from rlhf_spmd.runtime.generation.episodes import Answer

MOST_TRIES = 3  # with a fresh environment, after the first one broke
COMPLETED, TOOL_STOPPED, TIMEOUT = "completed", "tool_stopped", "rollout_timeout"
DROPPED = "dropped_episodes"  # in the log


class Episodes:
    """The outside of the engine for some rows. Raises UserError for environments that break, and for a journal that
    does not fit what is drawn."""

    def __init__(
        self,
        rows: Sequence[Row],
        speeches: Sequence[Speech],
        workers: EnvironmentWorkers,
        journal: Journal,
        limits: Limits,
        *,
        seed: int,
        iteration: int,
        on_failure: Literal["stop", "drop_group"] = "stop",
    ):
        """speeches: of each row."""
        self.workers, self.journal, self.limits, self.on_failure = workers, journal, limits, on_failure
        self.seed, self.iteration = seed, iteration
        self.lives = [Life(*one, workers.new_episode()) for one in zip(rows, speeches, strict=True)]
        self.num_repeated = 0  # calls of which it is not known whether they were made before
        self.dropped: set[int] = set()  # groups
        self._tickets: dict[int, int] = {}  # of questions -> row
        self._ready: list[Answer] = []

    # ---- the engine's side ------------------------------------------------------------------------------------------

    def openings(self) -> list[list[int]]:
        """Returns the tokens of each prompt, as its environment opens it."""
        for number, life in enumerate(self.lives):
            self._go_on(number, self._open(number, life))
        self._wait_for_all()
        firsts = [(life.speech, life.row, life.opening or Opening()) for life in self.lives]
        return [speech.first(row.where, row.text, row.messages, opening) for speech, row, opening in firsts]

    def drew(self, row: int, token_ids: list[int]) -> None:
        """Notes that the model ended a turn of this row with these ids, the one that ends the turn included, if it drew
        one."""
        life = self.lives[row]
        assert life.work is None and not life.is_told, "a row draws after its turn has been answered"
        if not life.began_s:
            life.began_s = time.monotonic()
            life.until_s = life.began_s + self.limits.episode_s if self.limits.episode_s else 0.0
        life.turn += 1
        if life.reason:  # it broke before it began
            self._tell(row, life, life.reason)
            return
        self._go_on(row, self._turn(row, life, token_ids))

    def answers(self, wait_s: float) -> list[Answer]:
        """Returns the answers that have come back since; waits for so long at most if nothing has."""
        until_s = time.monotonic() + wait_s
        while not self._ready:
            self._out_of_time()
            now_s = time.monotonic()
            ends_s = [life.until_s - now_s for life in self.lives if life.ticket and life.until_s and not life.is_told]
            if self._ready or not self._tickets:
                break
            self._hear(max(0.0, min(until_s - now_s, *ends_s, float("inf"))))
            if now_s >= until_s:
                break
        found, self._ready = self._ready, []
        return found

    def rewards(self, row: int, reason: str) -> list[float]:
        """Returns the reward of each turn of a row that has ended: one for each call of `drew`, with the episode's own
        reward in the last. reason: why it ended, which of a limit of the engine only the engine knows."""
        life = self.lives[row]
        if not life.reason and life.work is None:
            life.is_told = True
            self._go_on(row, self._ended(row, life, reason))
        while life.work is not None:
            self._hear(1.0)
        found = [*life.turn_rewards, *[0.0] * (max(life.turn, 1) - len(life.turn_rewards))]
        found[-1] += life.end_reward
        return found

    def results(self) -> list[Result]:
        """Returns what the episodes came to, all of which are over."""
        assert all(life.reason for life in self.lives), "an episode is not over"
        return [
            Result(
                tuple(self.rewards(number, life.reason)),
                life.turn,
                life.num_calls,
                life.num_failures,
                life.num_timeouts,
                life.tries,
                life.reason,
                tuple(life.seconds),
                life.logs,
                self.is_dropped(number),
            )
            for number, life in enumerate(self.lives)
        ]

    def is_dropped(self, row: int) -> bool:
        """Returns whether an environment of the row's group broke too often; final once the group's rewards have been
        read."""
        return self.lives[row].row.group in self.dropped

    def counts(self) -> dict[str, tuple[int, int]]:
        """Returns tool calls, what became of them, and dropped episodes if there may be any: a number, and of how many
        episodes. Dropped ones are counted for each of several environments, too."""
        lives = self.lives
        found = {
            "tool_calls": sum(life.num_calls for life in lives),
            "tool_failures": sum(life.num_failures for life in lives),
            "tool_timeouts": sum(life.num_timeouts for life in lives),
            "calls_repeated": self.num_repeated,
        }
        counted = {name: (num, len(lives)) for name, num in found.items()}
        if self.on_failure == "drop_group" or self.dropped:
            by_name: dict[str, list[bool]] = {}
            for number, life in enumerate(lives):
                key = life.speech.environment.key
                for name in (DROPPED, *([f"{DROPPED}/{key}"] if key else [])):
                    by_name.setdefault(name, []).append(self.is_dropped(number))
            counted |= {name: (sum(dropped), len(dropped)) for name, dropped in by_name.items()}
        return counted

    def seconds(self) -> list[float]:
        """Returns the seconds of each answer that was not in the journal."""
        return [one_s for life in self.lives for one_s in life.seconds]

    def close(self) -> None:
        """Closes the journal."""
        self.journal.close()

    @property
    def is_exact(self) -> bool:
        """Whether no clock had a say."""
        return not any(life.num_timeouts or life.reason == TIMEOUT for life in self.lives)

    # ---- rows that wait ---------------------------------------------------------------------------------------------

    def _go_on(self, number: int, work: Asking | None, answer: Mapping[str, Any] | None = None) -> None:
        """Runs a row until it asks, or is done. work: a new one; None: what waits for this answer."""
        life = self.lives[number]
        life.work, life.ticket = work or life.work, 0
        assert life.work is not None
        try:
            message = next(life.work) if answer is None else life.work.send(answer)
        except StopIteration:
            life.work = None
            return
        limit_s = self.limits.tool_s if message["do"] in ("begin", "call", "step", "reward", "load") else 0.0
        life.ticket = self.workers.ask(life.episode, message, timeout_s=limit_s)
        self._tickets[life.ticket] = number

    def _hear(self, wait_s: float) -> None:
        for ticket, answer in self.workers.answers(wait_s, self._tickets):
            self._go_on(self._tickets.pop(ticket), None, answer)

    def _wait_for_all(self) -> None:
        while self._tickets:
            self._hear(1.0)

    def _out_of_time(self) -> None:
        """Ends the episodes that wait and whose time is over."""
        for number, life in enumerate(self.lives):
            if life.ticket and life.until_s and time.monotonic() >= life.until_s and not life.is_told:
                self._tickets.pop(life.ticket, None)
                self.workers.drop(life.ticket)
                life.ticket, life.work = 0, None
                self.journal.add(self._key(life, END), {"reason": TIMEOUT, "turn": life.turn, "reward": 0.0})
                self._say_over(number, life, TIMEOUT)

    def _say_over(self, number: int, life: Life, reason: str) -> None:
        life.reason = reason
        self.workers.leave(life.episode)
        self._tell(number, life, reason)

    def _tell(self, number: int, life: Life, reason: str) -> None:
        """Tells the engine once that an episode is over; not before it has drawn anything."""
        if life.turn and not life.is_told:
            life.is_told = True
            self._ready.append(Answer(number, None, reason))

    # ---- what a row asks --------------------------------------------------------------------------------------------

    def _is_over_in_journal(self, number: int, life: Life) -> bool:
        """Ends an episode that a clock or a broken environment has ended in this turn before, by the journal."""
        known = self.journal.answers.get(self._key(life, END), {})
        is_broken = known.get("is_broken", False)
        if known.get("turn") != life.turn or not (is_broken or known["reason"] == TIMEOUT):
            return False
        if is_broken:
            self.dropped.add(life.row.group)
        self._say_over(number, life, known["reason"])
        return True

    def _open(self, number: int, life: Life) -> Asking:
        key = self._key(life, OPENING)
        known = self.journal.answers.get(key)
        if self._is_over_in_journal(number, life):
            return
        if known is not None:
            life.opening = Opening(**known["opening"])
        elif not life.speech.environment.is_stateless:
            answer: dict[str, Any] = {}
            yield from self._asked(number, life, self._begin(life), answer)
            if "opening" in answer:
                self.journal.add(key, {"opening": answer["opening"]})
                life.opening = Opening(**answer["opening"])

    def _turn(self, number: int, life: Life, drawn: list[int]) -> Asking:
        """Answers a turn."""
        if self._is_over_in_journal(number, life):
            return
        speech, limits = life.speech, self.limits
        _, calls = speech.read(drawn, is_first=life.turn == 1)
        if speech.form and not calls:
            yield from self._ended(number, life, COMPLETED)
            return
        if limits.calls and life.num_calls + len(calls) > limits.calls:
            yield from self._ended(number, life, "max_tool_calls")
            return
        steps: list[Step] = []
        digest = hashlib.sha256(repr(drawn).encode()).hexdigest()[:16]
        for place, call in enumerate(calls or [None]):
            message: dict[str, Any] = {"do": "step", "text": speech.said(drawn)}
            if call is not None:
                message = {"do": "call", "name": call.name, "arguments": call.arguments}
                life.num_calls += 1
            if call is not None and call.error:
                steps.append(Step(call.error, has_failed=True))
            else:
                yield from self._one_call(number, life, place, digest, message, call, steps)
            if life.reason:  # it was dropped
                return
            life.num_failures += steps[-1].has_failed
        life.turn_rewards.append(sum(step.reward for step in steps))
        for step in steps:
            for name, value in step.logs.items():
                life.logs[name] = life.logs.get(name, 0.0) + value
        if any(step.is_done for step in steps):
            yield from self._ended(number, life, TOOL_STOPPED)
        elif limits.turns and life.turn >= limits.turns:
            yield from self._ended(number, life, "max_turns")
        elif life.until_s and time.monotonic() >= life.until_s:
            self.journal.add(self._key(life, END), {"reason": TIMEOUT, "turn": life.turn, "reward": 0.0})
            self._say_over(number, life, TIMEOUT)
        else:
            self._ready.append(Answer(number, tuple(speech.back(drawn, calls, steps))))

    def _one_call(
        self,
        number: int,
        life: Life,
        place: int,
        digest: str,
        message: dict[str, Any],
        call: Call | None,
        steps: list[Step],
    ) -> Asking:
        """Adds the answer of one call, from the journal or from the environment.

        place: in the turn.
        digest: of what was drawn.
        """
        key, limit_s = self._key(life, life.turn, place), self.limits.tool_s
        known = self.journal.answers.get(key)
        if known is not None and known["drawn"] != digest:
            raise UserError(
                f"{life.where}: the model draws something else than when the journal {self.journal.folder} was "
                "written, so it would be answered wrongly: resume with the same weights, options and kind of machine, "
                "or remove the journal"
            )
        if known is None:
            name = call.name if call else "step"
            if key in self.journal.asked:
                if name in life.speech.environment.once:
                    raise UserError(
                        f"{life.where}: the call of {name} was made before the run ended, and its answer is not known; "
                        "it must not be made again (once): find out what it did, and add its line to the journal "
                        f"{self.journal.folder}, or start anew"
                    )
                self.num_repeated += 1
            self.journal.ask(key)
            began_s, answer = time.monotonic(), dict[str, Any]()
            columns = {} if call is None else {"columns": dict(life.row.columns)}
            yield from self._asked(number, life, message | columns, answer)
            if life.reason:
                return
            life.seconds.append(time.monotonic() - began_s)
            late = {"back": f"error: timed out after {limit_s:g} s", "has_failed": True}
            step = Step(**(late if answer.get("timed_out") else answer["step"]))
            known = {"drawn": digest, "step": asdict(step), "late": bool(answer.get("timed_out"))}
            known |= {"seconds": round(life.seconds[-1], 6), "state": answer.get("state")}
            self.journal.add(key, known)
        step = Step(**known["step"])
        life.num_timeouts += known["late"]
        life.made.append((message, None if known["late"] else step))
        life.state = known["state"]
        steps.append(step)

    def _ended(self, number: int, life: Life, reason: str) -> Asking:
        """Ends an episode: the engine is told at once, then its last reward is asked for."""
        if life.speech.environment.is_stateless:
            self._say_over(number, life, reason)
            return
        self._tell(number, life, reason)
        known = self.journal.answers.get(self._key(life, END))
        if self._is_over_in_journal(number, life):
            return
        if known is None:
            answer: dict[str, Any] = {}
            yield from self._asked(number, life, {"do": "reward"}, answer)
            if life.reason:
                return
            known = {"reason": reason, "turn": life.turn, "reward": answer["reward"]}
            self.journal.add(self._key(life, END), known)
        life.end_reward = known["reward"]
        self._say_over(number, life, reason)

    def _asked(self, number: int, life: Life, message: dict[str, Any], found: dict[str, Any]) -> Asking:
        """Asks the environment, brought to where it was if there is none, and puts the answer into `found`. Raises
        UserError if it breaks again and again, or ends the episode if groups may be dropped."""
        was_asked, is_stateless = False, life.speech.environment.is_stateless
        while True:
            first = self.workers.holds(life.episode) or is_stateless
            for step, known in [*([] if first else self._way(life, message)), (message, None)]:
                if step["do"] != "begin" and not (self.workers.holds(life.episode) or is_stateless):
                    break  # its worker has ended since the last answer
                self._check_once(life, step, is_again=known is not None or step is message and was_asked)
                answer = yield step
                was_asked = was_asked or step is message and "unsent" not in answer
                if "misused" in answer:
                    raise UserError(f"{life.where}: environment {life.speech.environment.name!r}: {answer['misused']}")
                broken = answer.get("broken", "")
                if answer.get("timed_out") and (step["do"] not in ("call", "step") or known is not None):
                    broken = f"its {step['do']} timed out after {self.limits.tool_s:g} s"
                if broken or "gone" in answer:
                    self.workers.leave(life.episode)
                    life.tries += bool(broken)
                    if life.tries > MOST_TRIES:
                        self._give_up(number, life, broken)
                        return
                    break
                self._compare(life, step, known, answer)
            else:
                found |= answer
                return

    def _way(self, life: Life, message: dict[str, Any]) -> list[tuple[dict[str, Any], Any]]:
        """Returns the way that brings a new object to where the episode is, and what it answered then."""
        if message["do"] == "begin":
            return []
        opening = [(self._begin(life), life.opening)]
        if life.speech.environment.saves and life.state is not None:
            return [*opening, ({"do": "load", "state": life.state}, None)]
        return opening + [(asked, step) for asked, step in life.made if step is not None]

    def _check_once(self, life: Life, asked: Mapping[str, Any], *, is_again: bool) -> None:
        """Raises UserError for a tool that must not be called again."""
        if is_again and asked.get("name") in life.speech.environment.once:
            raise UserError(
                f"{life.where}: its environment is made anew, so the call of {asked['name']} would be made again, "
                "which it must not be (once): find out what it did, or give the environment save() and load()"
            )

    def _compare(self, life: Life, asked: dict[str, Any], known: Any, answer: Mapping[str, Any]) -> None:
        """Raises UserError unless a call that is made again is answered as before."""
        if known is None:
            return
        again = Opening(**answer["opening"]) if asked["do"] == "begin" else Step(**answer["step"])
        if again != known:
            what = {"begin": "reset()", "step": "step()"}.get(asked["do"], asked.get("name"))
            raise UserError(
                f"{life.where}: {what} of {life.speech.environment.name} gave {str(again)[:200]} where it gave "
                f"{str(known)[:200]} before, so the episode cannot be continued: let its answers depend on the calls, "
                "the columns and the seeds alone, or give it save() and load()"
            )

    def _give_up(self, number: int, life: Life, broken: str) -> None:
        said = f"the environment {life.speech.environment.name} broke {life.tries} times"
        if self.on_failure == "drop_group":
            output.say(f"{output.NOTE}{said}, so the group of an episode is dropped\n{broken}")
            self.dropped.add(life.row.group)
            line = {"reason": TOOL_STOPPED, "turn": life.turn, "reward": 0.0, "is_broken": True}
            self.journal.add(self._key(life, END), line)
            self._say_over(number, life, TOOL_STOPPED)
            return
        raise UserError(
            f"{life.where}: {said}: fix it, let a tool return a text about what is wrong, or leave such groups out "
            f"(episode.on_failure=drop_group)\n{broken}"
        )

    def _begin(self, life: Life) -> dict[str, Any]:
        row, key = life.row, (self.seed, self.iteration, life.row.prompt)
        start = {"columns": dict(row.columns), "prompt": row.text, "messages": row.messages}
        return {"do": "begin", "start": start | {"seed": seed_of(*key), "sample_seed": seed_of(*key, row.sample)}}

    def _key(self, life: Life, turn: int, place: int = 0) -> Key:
        return life.row.prompt, life.row.sample, turn, place
