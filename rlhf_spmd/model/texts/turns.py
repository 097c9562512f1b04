"""Joins the turns of a conversation in tokens: what stands between what the model drew and its next turn.

What was drawn is never tokenised again. What follows is written by the model's own chat template, by the difference of
two renderings of a short conversation: the end of the assistant's turn, the messages that came back, and the beginning
of the next turn. This is the text of the whole conversation only if the template never changes what it wrote earlier,
which `check` tries with the roles that the run will use, and with and without thinking.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_spmd.errors import UserError

Message = dict[str, Any]
MARK = "\ue000"  # for private use, so no text has it
ASK: Message = {"role": "user", "content": "?"}
THINK, END_OF_THINKING = "<think>", "</think>"
THINKING = f"{THINK}\n{{}}\n{END_OF_THINKING}\n\n"
NO_END = (
    "the {} ({!r}) does not end a response: add its id to eos_token_id in generation_config.json of the model, unless "
    "it is not meant to"
)


@dataclass(slots=True)
class TurnJoins:
    """Joins for one chat template with one list of tools.

    render(messages, answers): the text of a conversation and, with `answers`, the beginning of the assistant's next
    turn. encode(text): its tokens, without those that a tokenizer adds to whole texts.

    stops: the tokens that end a turn.
    name: of the template, for messages.
    """

    render: Callable[[list[Message], bool], str]
    encode: Callable[[str], list[int]]
    stops: frozenset[int]
    name: str
    _end: str | None = field(default=None, init=False)

    def after(self, drawn: Sequence[int], back: Sequence[Message], calls: Sequence[Message] = ()) -> list[int]:
        """Returns the tokens after a turn: its end unless the model drew one, what came back, and the beginning of the
        next turn. Raises UserError if the template does not only add.

        back: messages with the roles user or tool.
        calls: the `tool_calls` of the turn that messages of tools answer, which some templates ask for.
        """
        before, whole = self._around(back, calls)
        if not whole.startswith(before):
            raise self._refused("what it wrote of a turn changes when an answer follows")
        tokens = self.encode(self.end + whole[len(before) :])
        has_ended = bool(drawn) and drawn[-1] in self.stops
        return tokens[1:] if has_ended and tokens and tokens[0] in self.stops else tokens

    def _around(self, back: Sequence[Message], calls: Sequence[Message]) -> tuple[str, str]:
        """Renders a conversation up to a turn's end, and up to the next turn. Templates that write one call at most get
        the first one, so that what follows a turn with several is still written."""
        said = _answer(MARK, calls)
        try:
            return self.render([ASK, said], False), self.render([ASK, said, *back], True)
        except UserError:
            if len(calls) < 2:
                raise
            return self._around(back, calls[:1])

    @property
    def end(self) -> str:
        """What the template writes after what the assistant said, before anything else follows."""
        if self._end is None:
            _, mark, self._end = self.render([ASK, _answer(MARK)], False).rpartition(MARK)
            if not mark:
                raise self._refused("it does not write what the assistant said")
        return self._end

    def unended(self, stop: Sequence[str] = ()) -> str:
        """Returns a note if what the template writes after a turn does not end it; empty: it does, or is nothing. stop:
        texts that end it, too."""
        does = any(one in self.stops for one in self.encode(self.end)) or any(one in self.end for one in stop)
        return "" if does or not self.end.strip() else NO_END.format("end of a turn in the chat template", self.end)

    def call_text(self, calls: Sequence[Message]) -> str:
        """Renders a turn that only calls tools, without the end of the turn; empty: the template does not write
        calls."""
        opened, said = self.render([ASK], True), self.render([ASK, _answer("", calls)], False)
        text = said[len(opened) :] if said.startswith(opened) else said
        return text.removesuffix(self.end)

    def opens_thought(self, after: Sequence[Message] = ()) -> bool:
        """Returns whether the template begins the next turn inside a thought. after: what follows the first request."""
        return self.render([ASK, *after], True).rstrip().endswith(THINK)

    def check(self, roles: Sequence[str]) -> None:
        """Raises UserError unless the template only adds to what it wrote, with answers of these roles (user, tool)."""
        for role in roles:
            for first, second in ((MARK, MARK), (THINKING.format(MARK) + MARK, MARK), (MARK, THINKING.format(MARK))):
                self._try(role, first, second)
            # a turn must be able to follow the beginning that the template writes for it
            opened = self.render([ASK], True)
            turns = (self.render([ASK, _answer(text)], False) for text in (MARK, THINKING.format(MARK) + MARK))
            if not any(turn.startswith(opened) for turn in turns):
                raise self._refused("an earlier turn begins in another way than the one that is to be generated")

    def _try(self, role: str, first: str, second: str) -> None:
        """Renders a conversation of two turns of the assistant piece by piece. Raises UserError."""
        conversation, text = [ASK], self.render([ASK], False)
        for said in (first, second):
            calls = [tool_call("f", {}, "000000000")] if role == "tool" else []
            conversation.append(_answer(said, calls))
            for back in (None, answer_of(role, "!", "f", "000000000")):
                conversation += [back] if back else []
                longer = self.render(conversation, False)
                if not longer.startswith(text):
                    lost = " with its thinking" if "think" in first and THINKING.format(MARK) not in longer else ""
                    what = f"an answer of the {role}" if back else "the next turn"
                    raise self._refused(f"what it wrote of a turn{lost} changes when {what} follows")
                text = longer
            opened = self.render(conversation, True)
            if not opened.startswith(text):
                raise self._refused("what it wrote changes when the assistant's next turn begins")

    def _refused(self, why: str) -> UserError:
        return UserError(
            f"the chat template of {self.name} does not only add to what it wrote of earlier turns, so the turns of an "
            f"episode cannot be joined: {why}; give data.chat_template=FILE with one that keeps every turn as it is"
        )


def tool_call(name: str, arguments: dict[str, Any], number: str) -> Message:
    """Returns a call as chat templates take it.

    number: its id.
    """
    return {"type": "function", "id": number, "function": {"name": name, "arguments": arguments}}


def with_arguments_as_text(message: Message) -> Message:
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return message | {"tool_calls": calls} if calls else message


def answer_of(role: str, text: str, name: str = "", number: str = "") -> Message:
    """Returns the message of a user or a tool that answers a turn.

    name, number: of the call, for tools.
    """
    if role != "tool":
        return {"role": role, "content": text}
    return {"role": "tool", "name": name, "tool_call_id": number, "content": text}


def _answer(text: str, calls: Sequence[Message] = ()) -> Message:
    message: Message = {"role": "assistant", "content": text}
    return message | ({"tool_calls": list(calls)} if calls else {})
