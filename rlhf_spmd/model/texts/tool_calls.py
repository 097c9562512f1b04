"""Reads the tool calls in what a model said, in the format of the model.

    hermes      <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>, any number of them (Hermes, Qwen)
    llama       {"name": "f", "parameters": {"x": 1}}; ... and nothing else (Llama 3)
    pythonic    [f(x=1), g()] and nothing else (Llama 3.2 and 4)
    mistral     [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "000000000"}] (Mistral)

A call that cannot be read is a call with an error, which the model gets as its answer. What a model thinks calls
nothing.
"""

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.texts.turns import TurnJoins, tool_call

HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
PYTHON_TAG, TOOL_CALLS, END_OF_THINKING = "<|python_tag|>", "[TOOL_CALLS]", "</think>"
ID = re.compile(r"[A-Za-z0-9]{9}")  # of Mistral, whose template refuses any other
FIRST_ID = 100_000_000  # of calls whose format has none


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool.

    number: its id.
    error: why it cannot be read, in words for the model; empty: it can.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    number: str = ""
    error: str = ""

    @property
    def message(self) -> dict[str, Any]:
        """As chat templates take it."""
        return tool_call(self.name or "unknown", self.arguments, self.number)


def read_calls(text: str, form: str) -> list[Call]:
    """Returns the calls of a turn, in order; none if it calls nothing. form: a key of FORMATS."""
    found = FORMATS[form](text.rpartition(END_OF_THINKING)[2].strip())
    calls = []
    for place, call in enumerate(found):
        number = call.number if ID.fullmatch(call.number) else str(FIRST_ID + place)
        calls.append(Call(call.name, call.arguments, number, call.error))
    return calls


def words_before(text: str, form: str) -> str:
    """Returns what a turn that calls tools says before it does. form: a key of FORMATS, of which two allow no words."""
    thought, end, said = text.rpartition(END_OF_THINKING)
    mark = {"hermes": "<tool_call>", "mistral": TOOL_CALLS}.get(form)
    return thought + end + (said.partition(mark)[0] if mark else "")


def format_of(joins: TurnJoins, chosen: str = "") -> str:
    """Returns the format of a chat template: the one that reads a call as the template writes it. chosen: by the user,
    a key of FORMATS. Raises UserError."""
    if chosen in FORMATS:
        return chosen
    known = ", ".join(FORMATS)
    if chosen:
        raise UserError(f"{chosen!r} is not a format of tool calls; known: {known}")
    wanted = Call("look_up", {"word": "a b"}, str(FIRST_ID))
    text = joins.call_text([wanted.message])
    for form in FORMATS:
        if [(call.name, call.arguments) for call in read_calls(text, form)] == [(wanted.name, wanted.arguments)]:
            return form
    raise UserError(
        f"the chat template of {joins.name} writes a tool call as {text[:80]!r}, which is none of the known formats "
        f"({known}); give a chat template of one of them"
    )


# ---- formats --------------------------------------------------------------------------------------------------------


def _hermes(text: str) -> list[Call]:
    return [_of_json(found[1], "arguments") for found in HERMES.finditer(text)]


def _llama(text: str) -> list[Call]:
    is_tagged = text.startswith(PYTHON_TAG)
    text = text.removeprefix(PYTHON_TAG).strip()
    if not text.startswith("{") or not (is_tagged or re.match(r'\{\s*"(name|type|function|parameters)"', text)):
        return [_unread(f"it is not a JSON object: {text[:80]}")] if is_tagged else []
    decoder, found, place = json.JSONDecoder(), [], 0
    while place < len(text):
        try:
            _, stop = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            stop = len(text)
        found.append(_of_json(text[place:stop], "parameters"))
        place = stop + len(text[stop:]) - len(text[stop:].lstrip("; \n"))
    return found


def _mistral(text: str) -> list[Call]:
    before, tag, listed = text.partition(TOOL_CALLS)
    if not tag:
        return []
    try:
        calls = json.loads(listed)
    except (ValueError, RecursionError) as error:
        return [_unread(str(error))]
    if not isinstance(calls, list):
        return [_unread("it is not a list of calls")]
    return [_of_object(call, "arguments") for call in calls]


def _pythonic(text: str) -> list[Call]:
    text = text.removeprefix(PYTHON_TAG).strip()
    if not re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", text):
        return []
    try:
        listed = ast.parse(text, mode="eval").body
        assert isinstance(listed, ast.List)
        return [_of_python(node) for node in listed.elts]
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError) as error:
        return [_unread(f"it is not a list of calls such as [f(x=1)] ({error})")]


def _of_python(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        return _unread(f"{ast.unparse(node)[:80]} is not a call with named arguments, such as f(x=1)")
    try:
        return Call(ast.unparse(node.func), {str(word.arg): ast.literal_eval(word.value) for word in node.keywords})
    except (ValueError, RecursionError, MemoryError):
        return _unread(f"{ast.unparse(node)[:80]} has an argument that is not a plain value")


def _of_json(text: str, key: str) -> Call:
    """Reads calls from JSON.

    key: the one of the arguments, in the format.
    """
    try:
        return _of_object(json.loads(text), key)
    except (ValueError, RecursionError) as error:
        return _unread(str(error))


def _of_object(value: Any, key: str) -> Call:
    other = "arguments" if key == "parameters" else "parameters"
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _unread(f'it is not an object such as {{"name": "f", "{key}": {{"x": 1}}}}')
    arguments = value.get(key, value.get(other, {}))
    if isinstance(arguments, str):  # as OpenAI's interface has them
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return _unread(str(error), value["name"])
    if not isinstance(arguments, dict):
        return _unread(f"its {key} are not an object", value["name"])
    return Call(value["name"], arguments, str(value.get("id", "")))


def _unread(why: str, name: str = "") -> Call:
    return Call(name, error=f"error: this tool call cannot be read: {why}")


FORMATS: dict[str, Callable[[str], Sequence[Call]]] = {
    "hermes": _hermes,
    "mistral": _mistral,
    "llama": _llama,
    "pythonic": _pythonic,
}
