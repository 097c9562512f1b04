"""Conversations in data files: lists of messages, in the forms of OpenAI, ShareGPT and their like."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.texts.written import ASSISTANT, LEARNED, SAID
from rlhf_spmd.runtime.data.readers import CONVERSATIONS, Record, first_of, kind_of

SYSTEMS = ("system", "system_prompt")  # columns with the first message of a conversation that has none
SHARE_GPT_ROLES = {"human": "user", "gpt": ASSISTANT, "observation": "tool"}
CALL_ROLES, ANSWER_ROLES = ("function_call", "tool_call"), ("function", "tool_response")  # of tools, in other programs
FORM = 'write {"role": "...", "content": "..."} with two strings'
CALL_FORM = 'an object such as {"name": "f", "arguments": {"x": 1}}, or JSON text of one'
Message = dict[str, Any]  # `role`, and `content` unless it says something else; what else it has is for the template


def messages_of(where: str, record: Record, key: str) -> list[Message]:
    """Returns a column that must be a conversation, each message with `role` and `content` as text. Keys that are null
    are left out, as transformers does. Raises UserError."""
    values = record[key]
    if not isinstance(values, list):
        raise UserError(f"{where}: the value of {key!r} is {kind_of(values)}, not a list of messages")
    if not values:
        raise UserError(f"{where}: {key!r} has no message")
    return [_message(f"{where}: message {number} of {key!r}", value) for number, value in enumerate(values, start=1)]


def with_system(where: str, record: Record, messages: list[Message]) -> list[Message]:
    """Returns a conversation with the row's column of SYSTEMS as its first message, if it has one and the conversation
    has none. Raises UserError if it has another one."""
    name = system_column(record)
    if name is None:
        return messages
    system = _message(f"{where}: {name!r}", {"role": "system", "content": record[name]})
    texts = [message.get("content", "").strip() for message in messages if message["role"] in ("system", "developer")]
    if not texts:
        return [system, *messages]
    if system["content"].strip() not in texts:
        raise UserError(f"{where}: {name!r} is not what the conversation's own system message says: remove one of them")
    return messages


def system_column(record: Mapping[str, Any]) -> str | None:
    """Returns the name of the column with a system message, if the row has one."""
    return next((name for name in SYSTEMS if str(record.get(name) or "").strip()), None)


def conversation_of(columns: Mapping[str, Any], key: str) -> list[Message] | None:
    """Returns the messages before the answer, if the prompt of a row is a conversation. columns: of a data set that was
    read, in which a text beside a conversation is kept. key: the column of prompts."""
    record = dict(columns)
    name = first_of(record, (key, *CONVERSATIONS) if key == "prompt" else (key,))
    if name is None or not isinstance(record[name], list):
        return None
    messages = with_system("the data set", record, messages_of("the data set", record, name))
    return messages[:-1] if messages[-1]["role"] == ASSISTANT else messages


def is_learned(where: str, message: Message) -> bool:
    """Returns whether a message is learned: it is the assistant's, and none of its keys of LEARNED is 0. Raises
    UserError for values other than 0 and 1."""
    if message["role"] != ASSISTANT:
        return False
    marks = {name: message[name] for name in LEARNED if name in message}
    for name, mark in marks.items():
        if mark not in (0, 1):
            raise UserError(f"{where}: {mark!r} is not a {name!r} of a message: write 1 if it is learned, 0 if not")
    return all(marks.values())


def says_something(message: Message) -> bool:
    """Returns whether a message of the assistant is not empty."""
    values = [message.get(name) for name in SAID]
    return any(value.strip() if isinstance(value, str) else value for value in values)


def learned_places(where: str, messages: Sequence[Message]) -> list[int]:
    """Returns the places of the assistant's messages that are learned."""
    return [place for place, message in enumerate(messages) if is_learned(where, message)]


def _message(where: str, value: Any) -> Message:
    """Returns one message in the form of OpenAI."""
    if not isinstance(value, dict):
        raise UserError(f"{where} is {kind_of(value)}: {FORM}")
    message = {name: part for name, part in value.items() if part is not None}
    if "from" in message and "role" not in message:
        message = _from_share_gpt(message)
    if message.get("role") in CALL_ROLES:
        message |= {"role": ASSISTANT, "content": "", "function_call": message.pop("content", None)}
    elif message.get("role") in ANSWER_ROLES:
        message["role"] = "tool"
    calls = _parsed(message.pop("function_call", None) or message.get("tool_calls"), list | dict)
    if not calls:
        message.pop("tool_calls", None)
    else:  # in the place of the message's keys where it was, because some templates write them in order
        message["tool_calls"] = [_call(where, call) for call in (calls if isinstance(calls, list) else [calls])]
    if isinstance(message.get("content"), list):
        message["content"] = "".join(_text_part(where, part) for part in message["content"])
    if message.get("role") == ASSISTANT and "content" not in message and says_something(message):
        return message
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            what = f"has {kind_of(value[name])} as {name!r}" if name in value else f"has no {name!r}"
            raise UserError(f"{where} {what}: {FORM}")
    return message


def _from_share_gpt(message: Message) -> Message:
    """Returns a message with `from` and `value` under the names of OpenAI."""
    role = message.pop("from")
    renamed = {"role": SHARE_GPT_ROLES.get(role, role) if isinstance(role, str) else role} | message
    if "value" in renamed and "content" not in renamed:
        renamed["content"] = renamed.pop("value")
    return renamed


def _call(where: str, call: Any) -> Message:
    """Returns a call of a tool as chat templates take it, also of its inner object alone. JSON text becomes objects."""
    if isinstance(call, dict) and "function" not in call:
        inner = {name: call[name] for name in ("name", "arguments") if name in call}
        outer = {name: part for name, part in call.items() if name not in inner}
        call = {"type": "function"} | outer | {"function": inner}
    function = call["function"] if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"{where} has a call of a tool that is not {CALL_FORM}: correct it")
    return call | {"function": function | {"arguments": _parsed(function.get("arguments", {}), dict)}}


def _parsed(value: Any, kind: Any) -> Any:
    """Returns what JSON text says, if that is of this kind, else the value itself; empty text is an empty object."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value or "{}")
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, kind) else value


def _text_part(where: str, part: Any) -> str:
    """Returns the text of one part of a message. Raises UserError for another part, such as an image."""
    if isinstance(part, dict) and part.get("type", "text") in ("text", None) and isinstance(part.get("text"), str):
        return part["text"]
    raise UserError(f'{where} has a part that is not {{"type": "text", "text": "..."}}: the models here read text only')
