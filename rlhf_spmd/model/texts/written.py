"""Finds what messages say and a chat template does not write: it renders marks in the place of what is said, and looks
which of them come out. One conversation is tried for each kind of message."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import count
from typing import Any

from rlhf_spmd.errors import UserError

Message = dict[str, Any]
ASSISTANT = "assistant"  # a role of messages
SAID = ("content", "tool_calls", "reasoning_content", "thinking", "reasoning")  # what a message of the assistant says
LEARNED = ("weight", "loss", "train")  # keys of the assistant's messages: 0, if they are not learned
NO_WORDS = ("role", "id", "index", "type", "tool_call_id")  # keys that say who speaks, and which call is answered
FIRST_MARK = 730_591_000  # marks are nine digits, which outlive trimming, JSON and capitals, and are ids for Mistral
WORDS = re.compile(r"\S(?:.*\S)?")  # a line without the white space around it


def constants_of(template: Any) -> list[str]:
    """Returns the texts that a template, parsed by jinja2, looks for: those in calls, comparisons, filters and
    assignments. A single word may be a name (of a role, a key or a variable), if it does not look for it in a text."""
    from jinja2 import nodes

    found = set[str]()
    for look in template.find_all((nodes.Call, nodes.Compare, nodes.Filter, nodes.Assign)):
        in_texts = getattr(look, "args", ())[:1]
        if isinstance(look, nodes.Compare):
            in_texts = [look.expr]
        elif getattr(look, "name", "") != "replace" and getattr(getattr(look, "node", None), "attr", "get") == "get":
            in_texts = ()
        values = [node.value for node in look.find_all(nodes.Const) if not str(node.value).isidentifier()]
        values += [node.value for node in in_texts if isinstance(node, nodes.Const)]
        found |= {value for value in values if isinstance(value, str) and value.strip()}
    return sorted(found, key=lambda one: (-len(one), one))


def kinds(messages: Sequence[Message], learned: int, constants: Sequence[str]) -> list[tuple]:
    """Returns the kind of each message: what a template may look at, but for the words.

    learned: number of the first message that is learned.
    constants: texts that the template looks for, such as `</think>`.
    """
    roles = [message["role"] for message in messages]
    last = len(roles) - 1
    asked = last - roles[::-1].index("user") if "user" in roles else -1
    found, before, parts = [], "", _parts(tuple(constants))
    for place, message in enumerate(messages):  # 2 us a message, so that it costs little beside rendering
        keys = tuple(message) if all(message.values()) else tuple(filter(partial(_says, message), message))
        inside, content = list[str](), message.get("content", "")
        if any(one in content for one in constants):
            inside = parts.split(content, maxsplit=4)
            inside[::2] = ["." * bool(piece.strip()) for piece in inside[::2]]  # whether words stand around them
        calls = [bool(call["function"]["arguments"]) for call in message.get("tool_calls", ())[:2]]
        where = place > asked, place >= learned, place == last, "\n" in content
        found.append((roles[place], before, *where, keys, (*inside,), (*calls,)))
        before = roles[place]
    return found


def marked(messages: Sequence[Message], constants: Sequence[str]) -> tuple[list[Message], list[dict[str, list[str]]]]:
    """Returns the messages with marks in the place of what they say, and for each message the marks of its keys.
    Numbers of a message itself stay; their mark is their name. Equal texts of a message have one mark."""
    numbers, copies, marks = count(FIRST_MARK), list[Message](), list[dict[str, list[str]]]()
    parts = _parts(tuple(constants)) if constants else None
    for message in messages:
        mark_of: dict[str, str] = defaultdict(lambda: str(next(numbers)))
        said = {name: message[name] for name in message if _says(message, name) and name not in NO_WORDS}
        texts = {name: value for name, value in said.items() if not isinstance(value, int | float)}
        copies.append(message | {name: _with_marks(value, mark_of, parts) for name, value in texts.items()})
        of_key = partial(re.findall, "|".join(mark_of.values()) or "$.")
        marks.append({name: of_key(str(copies[-1][name])) if name in texts else [name] for name in said})
    return copies, marks


def changed(messages: Sequence[Message], text: str, learned: int) -> Iterator[int]:
    """Yields the places of messages whose content is not in the text that a template wrote, whatever it makes of white
    space: shortened, in capitals, with escapes. Earlier turns of the assistant and answers of tools may change."""
    written = "".join(text.split())
    for place, message in enumerate(messages):
        free = place < learned if message["role"] == ASSISTANT else message["role"] == "tool"
        if not free and "".join(message.get("content", "").split()) not in written:
            yield place


def _says(message: Message, name: str) -> bool:
    """Returns whether a key says something: 0 does."""
    return bool(message[name]) or message[name] == 0


@cache
def _parts(constants: tuple[str, ...]) -> re.Pattern:
    return re.compile(f"({'|'.join(map(re.escape, constants))})")


def _with_marks(value: Any, mark_of: dict[str, str], parts: re.Pattern | None) -> Any:
    if isinstance(value, dict):
        kept = NO_WORDS if "function" in value else ()  # of a call, not of its arguments
        return {name: part if name in kept else _with_marks(part, mark_of, None) for name, part in value.items()}
    if isinstance(value, list):
        return [_with_marks(part, mark_of, None) for part in value]
    pieces = parts.split(value) if parts else [str(value)]
    pieces[::2] = [WORDS.sub(lambda found: mark_of[found[0]], piece) for piece in pieces[::2]]
    return "".join(pieces)


def lost(
    where: str, messages: Sequence[Message], marks: Sequence[dict[str, list[str]]], text: str, learned: int
) -> Iterator[str]:
    """Yields notes about what is not in the text that a template wrote of marked messages. Raises UserError if it is to
    be learned, an instruction, an answer or a call."""
    for place, (message, of_keys) in enumerate(zip(messages, marks, strict=True)):
        role = message["role"]
        for name, own in of_keys.items():
            gone = [mark for mark in own if mark not in text]
            if not gone or (role == ASSISTANT and name in LEARNED):
                continue
            what = f"a part of {name!r}" if name == "content" and len(gone) < len(own) else repr(name)
            is_earlier = role == ASSISTANT and place < learned
            matters = name in SAID if role == ASSISTANT else name == "content"
            if matters and not (is_earlier and (what != repr(name) or name not in SAID[:2])):
                why = "" if role == ASSISTANT else f": it may not know the role {role!r}"
                raise UserError(
                    f"{where}: the chat template does not write {what} of message {place + 1} ({role}), so a model "
                    f"would never see it{why}; give data.chat_template=FILE with one that does, or remove it"
                )
            yield f"the chat template does not write {what} of {'earlier ' * is_earlier}messages of the role {role}"
