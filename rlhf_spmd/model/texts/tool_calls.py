"""Reads the tool calls in what a model said, in the format of the model.

    hermes      <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>, any number of them (Hermes, Qwen)
    llama       {"name": "f", "parameters": {"x": 1}}; ... and no words before (Llama 3)
    pythonic    [f(x=1), g()] and no words before (Llama 3.2 and 4)
    olmo        <function_calls>f(x=1)</function_calls>, a call in each line (OLMo 3)
    glm         f and, in the next line, {"x": 1}, with no words before or after <|assistant|> (GLM-4)
    mistral     [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "000000000"}] (Mistral), also after
                <|tool_call|> (Granite 3) or functools (Phi-4-mini)

A turn is read from its beginning to its end: thoughts, words, calls, words. A thought calls nothing, also one that does
not end, and a mark inside the arguments of a call is data. A call that cannot be read is a call with an error, which
the model gets as its answer. Where calls have no mark (llama, pythonic, glm), other JSON and other lists are words.
"""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.texts.turns import END_OF_THINKING, THINK, TurnJoins, tool_call

END_OF_CALL, PYTHON_TAG = "</tool_call>", "<|python_tag|>"
END_OF_CALLS = "</function_calls>"
JSON_NAMES = {"true": True, "false": False, "null": None}  # which templates write for the values of Python
TAG = re.escape(PYTHON_TAG)
FIRST = rf"(?:\A|(?<={END_OF_THINKING}))\s*"  # no word stands before
PARAMETERS = {"parameters", "arguments"}  # what an object without a mark must have to be a call, beside its name
NAMES = re.compile(r'\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"]*"\s*,\s*"(parameters|arguments)"')
STRING = r"""("{3}|'{3}|"|')(?:\\.|(?!\1).)*\1"""
STRING_OR_BRACKET = re.compile(rf"{STRING}|[\[\](){{}}]", re.DOTALL)
STRING_OR_END = re.compile(f"{STRING}|{END_OF_CALLS}", re.DOTALL)
ID = re.compile(r"[A-Za-z0-9]{9}")  # of Mistral, whose template refuses any other
FIRST_ID = 100_000_000  # of calls whose format has none
UNREADABLE = (ValueError, RecursionError)  # from json
json_at = json.JSONDecoder().raw_decode


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


def read_calls(text: str, form: str, *, is_thinking: bool = False) -> list[Call]:
    """Returns the calls of a turn, in order; none if it calls nothing. Arguments: see read_turn."""
    return read_turn(text, form, is_thinking=is_thinking)[1]


def read_turn(text: str, form: str, *, is_thinking: bool = False) -> tuple[str, list[Call]]:
    """Returns what a turn says beside calls, thoughts included, and its calls, in order.

    form: a key of FORMATS.
    is_thinking: the turn begins inside a thought.
    """
    mark, read = FORMATS[form]
    words, calls, place = "", list[Call](), 0
    while place < len(text):
        found = re.compile(END_OF_THINKING if is_thinking else mark).search(text, place)
        was_thinking, is_thinking = is_thinking, found is not None and found[0] == THINK
        if found is None or is_thinking or was_thinking:
            here, after = list[Call](), found.end() if found else len(text)
        else:
            here, after = read(text, found.end(), PYTHON_TAG in found[0])
        words += text[place : found.start() if found and here else after]
        calls, place = calls + here, after
    return words, [_numbered(call, FIRST_ID + index) for index, call in enumerate(calls)]


def _numbered(call: Call, number: int) -> Call:
    return Call(call.name, call.arguments, call.number if ID.fullmatch(call.number) else str(number), call.error)


def format_of(joins: TurnJoins) -> str:
    """Returns the format of a chat template: the one that reads a call as the template writes it. Raises UserError."""
    wanted = Call("look_up", {"word": "a b"}, str(FIRST_ID))
    text = joins.call_text([wanted.message])
    for form in FORMATS:
        if [(call.name, call.arguments) for call in read_calls(text, form)] == [(wanted.name, wanted.arguments)]:
            return form
    raise UserError(
        f"the chat template of {joins.name} writes a tool call as {text[:80]!r}, which is none of the known formats "
        f"({', '.join(FORMATS)}); give a chat template of one of them"
    )


# ---- formats: the calls behind a mark, and where what follows them begins -------------------------------------------


def _hermes(text: str, place: int, _: bool) -> tuple[list[Call], int]:
    value, after, error = _json(text, place)
    rest = text[after:].lstrip()
    if rest and not error and not rest.startswith(END_OF_CALL):
        error = f"its JSON is followed by {rest[:40]!r}"
    end = text.find(END_OF_CALL, after)
    return [_of_object(value, "arguments", error)], len(text) if end < 0 else end + len(END_OF_CALL)


def _llama(text: str, place: int, is_tagged: bool) -> tuple[list[Call], int]:
    calls = list[Call]()
    while text[place : place + 1] == "{" or (is_tagged and not calls):
        value, after, error = _json(text, place)
        if text[place : place + 1] != "{":
            after, error = len(text), f"it is not a JSON object: {text[place : place + 80]}"
        is_call = NAMES.match(text, place) if error else isinstance(value.get("name"), str) and PARAMETERS & {*value}
        if not is_call and (calls or not is_tagged):
            return calls, place if calls else after
        calls.append(_of_object(value, "parameters", error))
        place = _begin(text, after, "; \n")
    return calls, place


def _mistral(text: str, place: int, _: bool) -> tuple[list[Call], int]:
    listed, after, error = _json(text, place)
    if error or not isinstance(listed, list):
        return [_unread(error or "it is not a list of calls")], after
    return [_of_object(call, "arguments") for call in listed], after


def _pythonic(text: str, place: int, _: bool) -> tuple[list[Call], int]:
    after = _end_of_list(text, place)
    try:
        listed = ast.parse(text[place:after], mode="eval").body
        assert isinstance(listed, ast.List)
        return [_of_python(node) for node in listed.elts], after
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError) as error:
        return [_unread(f"it is not a list of calls such as [f(x=1)] ({error})")], after


def _olmo(text: str, place: int, _: bool) -> tuple[list[Call], int]:
    ends = (found.span() for found in STRING_OR_END.finditer(text, place) if found[0] == END_OF_CALLS)
    end, after = next(ends, (len(text), len(text)))
    try:
        nodes = [node for node in ast.parse(text[place:end].strip()).body if isinstance(node, ast.Expr)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [_unread(f"it is not a line with a call such as f(x=1) ({error})")], after
    return [_of_python(node.value) for node in nodes], after


def _glm(text: str, place: int, _: bool) -> tuple[list[Call], int]:
    name, _line, _rest = text[place:].partition("\n")
    value, after, error = _json(text, place + len(name))
    return [_of_object({"name": name, "arguments": value}, "arguments", error)], len(text) if error else after


def _end_of_list(text: str, place: int) -> int:
    """Returns the place behind the bracket that closes the one at this place; the end of the text if none does."""
    depth = 0
    for found in STRING_OR_BRACKET.finditer(text, place):
        depth += (found[0] in "[({") - (found[0] in "])}")
        if not depth:
            return found.end()
    return len(text)


class _Constants(ast.NodeTransformer):
    """Puts the values of JSON in the place of their names."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(JSON_NAMES[node.id]) if node.id in JSON_NAMES else node


def _of_python(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        return _unread(f"{ast.unparse(node)[:80]} is not a call with named arguments, such as f(x=1)")
    try:
        values = {str(word.arg): ast.literal_eval(_Constants().visit(word.value)) for word in node.keywords}
        return Call(ast.unparse(node.func), values)
    except (ValueError, RecursionError, MemoryError):
        return _unread(f"{ast.unparse(node)[:80]} has an argument that is not a plain value")


def _begin(text: str, place: int, space: str | None = None) -> int:
    """Returns where the text goes on after space."""
    return len(text) - len(text[place:].lstrip(space))


def _json(text: str, place: int) -> tuple[Any, int, str]:
    """Reads one JSON value -> the value, where it ends or stops to be JSON, and why it does."""
    try:
        return *json_at(text, _begin(text, place)), ""
    except UNREADABLE as error:
        return None, getattr(error, "pos", len(text)), str(error)


def _of_object(value: Any, key: str, error: str = "") -> Call:
    """Returns the call that a JSON value is.

    key: the one of the arguments, in the format.
    error: why there is no value.
    """
    if error or not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _unread(error or f'it is not an object such as {{"name": "f", "{key}": {{"x": 1}}}}')
    arguments: Any = next((value[one] for one in (key, *PARAMETERS) if one in value), {})
    if isinstance(arguments, str):  # as OpenAI's interface has them
        try:
            arguments = json.loads(arguments or "{}")
        except UNREADABLE as why:
            error = str(why)
    if error or not isinstance(arguments, dict):
        return _unread(error or f"its {key} are not an object", value["name"])
    return Call(value["name"], arguments, str(value.get("id", "")))


def _unread(why: str, name: str = "") -> Call:
    return Call(name, error=f"error: this tool call cannot be read: {why}")


FORMATS: dict[str, tuple[str, Callable[[str, int, bool], tuple[list[Call], int]]]] = {
    "hermes": (f"{THINK}|<tool_call>", _hermes),
    "mistral": (rf"{THINK}|\[TOOL_CALLS\]|<\|tool_call\|>|functools(?=\[)", _mistral),
    "llama": (rf"{THINK}|{FIRST}(?:{TAG}\s*|(?=\{{))", _llama),
    "pythonic": (rf"{THINK}|{FIRST}(?:{TAG})?\s*(?=\[\s*[A-Za-z_][\w.]*\()", _pythonic),
    "olmo": (f"{THINK}|<function_calls>", _olmo),
    "glm": (rf"{THINK}|(?:{FIRST}|<\|assistant\|>)(?=[A-Za-z_][\w.-]*\n\{{)", _glm),
}
