"""Renders the rows of an environment: prompts, calls and observations, between text and tokens, and whole episodes as
text."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import tool_schema
from rlhf_spmd.model.texts.tokenizer import Tokenizer
from rlhf_spmd.model.texts.tool_calls import FIRST_ID, Call, format_of, read_turn
from rlhf_spmd.model.texts.turns import MARK, TurnJoins, answer_of, tool_call
from rlhf_spmd.runtime.environments.adapters import Environment
from rlhf_spmd.runtime.environments.native import ANSWER_ROLES, Message, Opening, Step

ANY_TOOL = '[{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]'
MOST_CALLS = 1000  # of a turn, for their ids
Turn = dict[str, str | list[str]]  # model: what it says beside calls; calls; answers, which the last turn may lack
Render = Callable[..., str]  # as of model.hf.ChatTemplate.render


@dataclass(frozen=True, slots=True)
class Renderer:
    """How the rows of one environment are written.

    form: of tool calls; empty: there are none.
    thinks: whether the first turn, and any later one, begins inside a thought that the template opened.
    with_tools: makes the renderer of tools that an agent names, in JSON.
    checked: roles of answers of which it is known that the template only adds to what it wrote.
    """

    environment: Environment
    tokenizer: Tokenizer
    joins: TurnJoins
    form: str
    thinks: tuple[bool, bool] = (False, False)
    with_tools: Callable[[str], "Renderer"] | None = None
    checked: set[str] = field(default_factory=set)

    def text_of(self, drawn: Sequence[int]) -> str:
        """Returns the text of a turn, for the environment."""
        return self.tokenizer.decode(drawn)

    def parse(self, drawn: Sequence[int], *, is_first: bool) -> tuple[str, list[Call]]:
        """Returns what a turn says beside tool calls, and these, whose marks may be special tokens.

        is_first: the turn is the first one of its episode.
        """
        if not self.form:
            return self.text_of(drawn), []
        text = self.tokenizer.decode([token for token in drawn if token not in self.joins.stops], special=True)
        return read_turn(text, self.form, is_thinking=self.thinks[not is_first])

    def said(self, drawn: Sequence[int], turn: int) -> tuple[str, list[Call]]:
        """Returns what a turn says to an agent, as `parse`. Calls that cannot be read are words, and no two calls of an
        episode have the same id unless the model writes it."""
        words, calls = self.parse(drawn, is_first=turn == 1)
        if any(call.error for call in calls):
            return self.text_of(drawn), []
        later = turn * MOST_CALLS
        return words, [
            replace(call, number=str(later + FIRST_ID + index)) if call.number == str(FIRST_ID + index) else call
            for index, call in enumerate(calls)
        ]

    def prompt_ids(self, where: str, text: str, messages: list[Message] | None, opening: Opening) -> list[int]:
        """Returns the tokens of a prompt as an environment opens it. Raises UserError.

        where: of the row, for messages.
        """
        if self.environment.speaks == "text":
            return self.tokenizer.encode(text if opening.text is None else opening.text, special=messages is None)
        messages = messages if opening.messages is None else opening.messages
        if messages is None and self.environment.speaks == "agent":  # which broke before its first request
            messages = [answer_of("user", text)]
        if messages is None:
            raise UserError(
                f"{where}: the prompt is text, and turns are joined by the chat template: write it as a list of "
                'messages, such as [{"role": "user", "content": "..."}]'
            )
        if opening.add and messages[-1]["role"] == "user":
            last = messages[-1]
            messages = [*messages[:-1], last | {"content": last["content"] + opening.add}]
        elif opening.add:
            messages = [*messages, answer_of("user", opening.add)]
        return self.joins.encode(self.joins.render(messages, True))

    def answer_ids(self, drawn: Sequence[int], calls: Sequence[Call], steps: Sequence[Step]) -> list[int]:
        """Returns the tokens that follow a turn.

        calls: of the turn.
        steps: what they, or the turn, were answered with.
        """
        if self.environment.speaks == "text":
            (step,) = steps
            assert isinstance(step.observation, str)
            return self.joins.encode(_unicode(step.observation))
        if self.environment.speaks == "agent":
            (step,) = steps
            assert isinstance(step.observation, list)
            return self._continued(drawn, calls, step.observation)
        if calls:
            answers = [
                answer_of("tool", _unicode(step.observation), _unicode(call.name) or "unknown", call.number)
                for call, step in zip(calls, steps, strict=True)
            ]
            return self.joins.after(drawn, answers, [call.message for call in calls])
        (step,) = steps
        given = [answer_of("user", step.observation)] if isinstance(step.observation, str) else step.observation
        messages = [message | {"content": _unicode(message["content"])} for message in given]
        return self.joins.after(drawn, messages)

    def _continued(self, drawn: Sequence[int], calls: Sequence[Call], added: Sequence[Message]) -> list[int]:
        """Returns the tokens of the messages that an agent adds."""
        if new := {message["role"] for message in added} - self.checked:
            self.joins.check(sorted(new))
            self.checked.update(new)
        messages = [message | {"content": _unicode(message["content"])} for message in added]
        return self.joins.after(drawn, messages, [call.message for call in calls])


def _unicode(text: Any) -> str:
    """Removes halves of surrogate pairs from a text, which no tokenizer takes, and which models and tools do write."""
    return str(text).encode(errors="replace").decode()


def renderer_of(
    environment: Environment,
    tokenizer: Tokenizer,
    render: Render,
    stops: Sequence[int],
    *,
    template: str,
) -> Renderer:
    """Returns how rows of an environment are written by a chat template. Raises UserError for a template that changes
    earlier turns, or has no known form of calls.

    render: with the chat_template_kwargs of the run.
    stops: the tokens that end a turn.
    template: its name, for messages.
    """

    def joined(tools: list[dict[str, Any]] | None) -> TurnJoins:
        def rendered(messages: list[Message], answers: bool) -> str:
            return render(template, messages, answers=answers, tools=tools)

        return TurnJoins(rendered, lambda text: tokenizer.encode(text, special=False), frozenset(stops), template)

    if environment.speaks == "agent":

        @cache
        def with_tools(text: str) -> Renderer:
            tools = json.loads(text)
            made = _of_tools(environment, tokenizer, joined(tools)) if tools else None
            return replace(made or Renderer(environment, tokenizer, joined(None), ""), with_tools=with_tools)

        return with_tools("null")
    tools = environment.schemas(tool_schema) or None
    joins = joined(tools)
    if environment.speaks == "text":
        return Renderer(environment, tokenizer, joins, "")
    joins.check(("tool",) if tools else ("user",))
    if not tools:
        return Renderer(environment, tokenizer, joins, "")
    return _of_tools(environment, tokenizer, joins)


def _of_tools(environment: Environment, tokenizer: Tokenizer, joins: TurnJoins) -> Renderer:
    """Returns how rows with calls are written. Raises UserError for a template that has no known form of calls."""
    call = tool_call("f", {}, "000000000")
    answered = [{"role": "assistant", "content": "", "tool_calls": [call]}, answer_of("tool", "!", "f", call["id"])]
    thinks = joins.opens_thought(), joins.opens_thought(answered)
    return Renderer(environment, tokenizer, joins, format_of(joins), thinks)


def extending(renderers: Iterable[Renderer]) -> list[str]:
    """Returns the roles of messages that a template only adds to what it wrote, of agents; those of another role, as of
    the user where the template then drops thoughts, begin another row."""
    roles = []
    for role in ANSWER_ROLES:
        with suppress(UserError):
            for renderer in renderers:
                assert renderer.with_tools is not None, "of an agent"
                (renderer.with_tools(ANY_TOOL) if role == "tool" else renderer).joins.check([role])
            roles.append(role)
    return roles


def transcript(renderer: Renderer, token_ids: Sequence[int], drawn: Sequence[bool]) -> list[Turn]:
    """Returns the turns of an episode. token_ids: of its response. drawn: which of them the model drew."""
    if renderer.with_tools is not None:  # of an agent, whose tools the rollouts do not have
        with suppress(UserError):  # of a template without calls
            renderer = renderer.with_tools(ANY_TOOL)
    turns: list[Turn] = []
    turn_ids: list[int] = []
    calls: list[Call] = []
    for is_drawn, part in groupby(zip(drawn, token_ids, strict=True), key=lambda pair: bool(pair[0])):
        ids = [token for _, token in part]
        if not is_drawn:
            if turns:
                turns[-1]["answers"] = _answers(renderer, turn_ids, ids, calls)
            continue
        turn_ids = ids
        words, calls = renderer.parse(ids, is_first=not turns)
        written: list[str] = []
        if any(call.error for call in calls) or not calls:
            words = renderer.text_of(ids)
        else:
            written = [f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})" for call in calls]
        turns.append({"model": words.strip(), "calls": written, "answers": []})
    return turns


def _answers(renderer: Renderer, turn_ids: list[int], ids: list[int], calls: Sequence[Call]) -> list[str]:
    """Returns what came back after a turn, without what the chat template writes around it, as far as it is known."""
    if renderer.environment.speaks != "text":
        answers = [answer_of("tool", MARK, call.name or "unknown", call.number) for call in calls]
        answers = answers or [answer_of("user", MARK)]
        around = renderer.joins.after(turn_ids, answers, [call.message for call in calls])
        parts = renderer.tokenizer.decode(around, special=True).split(MARK)
        text = renderer.tokenizer.decode(ids, special=True)
        match = re.fullmatch("(.*?)".join(map(re.escape, parts)), text, re.DOTALL)
        if match and len(parts) == len(answers) + 1:
            return [answer.strip() for answer in match.groups()]
    return [renderer.tokenizer.decode(ids).strip()]
