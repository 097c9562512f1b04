"""Tool calls: each format is read back as the template writes it, and what cannot be read is told to the model."""

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.texts.tool_calls import FORMATS, Call, format_of, read_calls, read_turn
from tests.templates import ALL_SPECIAL, joins_of, write_bytes_tokenizer

ARGUMENTS = {"a": 1, "b": [1.5, "x\n'"], "c": {"d": "é"}, "e": "</s>", "f": True, "g": None}


def named(calls: list[Call]) -> list[tuple]:
    return [(call.name, call.arguments) for call in calls]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bytes_tokenizer(tmp_path_factory.mktemp("tokenizer"), special=ALL_SPECIAL)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *[("chatml", "hermes"), ("qwen3_kept", "hermes"), ("llama3", "llama"), ("mistral", "mistral")],
        *[("granite", "mistral"), ("olmo3", "olmo"), ("glm4", "glm"), ("pythonic", "pythonic")],
    ],
)
def test_the_format_is_the_one_that_reads_what_the_template_writes(name, form, folder):
    joins = joins_of(folder, name)[0]
    assert format_of(joins) == form
    calls = [Call("f", ARGUMENTS, "123456789").message]
    assert named(read_calls(joins.call_text(calls), form)) == [("f", ARGUMENTS)]


@pytest.mark.parametrize("name", ["gemma", "smollm3", "phi4_mini", "phi4", "olmo2", "ernie4_5", "seed_oss"])
def test_a_template_without_calls_is_refused(name, folder):
    with pytest.raises(UserError, match=f"template of {name} writes a tool call as .*none of the known formats .herm"):
        format_of(joins_of(folder, name)[0])


@pytest.mark.parametrize(
    ("form", "text", "wanted"),
    [
        ("hermes", "so\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>\n<tool_call>\n"
                   '{"name": "g", "arguments": "{}"}', [("f", {"x": 1}), ("g", {})]),
        ("hermes", "<think>\n<tool_call>{}</tool_call>\n</think>\n\nno", []),
        ("hermes", "none", []),
        ("llama", '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
                  [("f", {"x": 1}), ("g", {})]),
        ("llama", '<|python_tag|>{"name": "f", "arguments": {}}', [("f", {})]),
        ("llama", '{"answer": 1}', []),
        ("llama", "[f()]", []),
        ("pythonic", '[f(x=1, y=["a", None]), m.g()]', [("f", {"x": 1, "y": ["a", None]}), ("m.g", {})]),
        ("pythonic", "[1, 2]", []),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdefghi"}]', [("f", {})]),
        ("mistral", "I think", []),
        ("mistral", '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]', [("f", {"x": 1})]),
        ("mistral", 'functools[{"name": "f", "arguments": {}}]', [("f", {})]),
        ("olmo", "so <function_calls>f(x=true)\nm.g(y=null, z=[1])</function_calls>",
                 [("f", {"x": True}), ("m.g", {"y": None, "z": [1]})]),
        ("olmo", "f(x=1)", []),
        ("glm", '\nso<|assistant|>f\n{"x": 1}<|observation|>', [("f", {"x": 1})]),
        ("glm", "Yes\nof course", []),
    ],
)  # fmt: skip
def test_calls_are_read_in_order(form, text, wanted):
    assert named(read_calls(text, form)) == wanted


F = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
LLAMA = '{"name": "f", "parameters": {"x": "a</think>; {b"}}'


@pytest.mark.parametrize(
    ("form", "text", "words", "names"),
    [
        ("hermes", f"<think>\nperhaps {F} but no", ..., ""),
        ("hermes", f"<think>{F}</think>so {F} or\n{F} it is", f"<think>{F}</think>so  or\n it is", "ff"),
        ("hermes", f"so</think>{F}<think>{F}</think>{F}<think>{F}", f"so</think><think>{F}</think><think>{F}", "ff"),
        ("hermes", F.replace("1", '"a</think>b <think> c</tool_call>d<tool_call>"'), "", "f"),
        ("hermes", F.replace("}}", "}") + F, "", "!f"),
        ("hermes", F.replace("}}", "}}}") + F, "", "!f"),
        ("hermes", F.replace("1", '"</tool_call>", y') + F, "", "!f"),
        ("llama", f"{LLAMA}\n\nShall I go on?", "Shall I go on?", "f"),
        ("llama", f"<think>{LLAMA}", ..., ""),
        ("llama", f"t</think>\n{LLAMA}; {LLAMA}", "t</think>", "ff"),
        ("llama", '{"name": "Alice", "age": 3}', ..., ""),
        ("llama", '{"name": "Alice", "age": ', ..., ""),
        ("llama", '{"type": "result", "value": 3}', ..., ""),
        ("llama", '{"name": 3, "parameters": {}}', ..., ""),
        ("llama", "{1, 2} is a set", ..., ""),
        ("llama", '{"a":' * 100_000, ..., ""),
        ("llama", LLAMA + '; {"note": 1}', '{"note": 1}', "f"),
        ("llama", '{"type": "function", "name": "f", "parameters": {}}', "", "f"),
        ("llama", '<|python_tag|>{"name": "f"} so', "so", "f"),
        ("pythonic", "[f(x=\"]a</think>\"), g(y='''\"]''')] so", " so", "fg"),
        ("pythonic", "[Alice (3), Bob (4)]", ..., ""),
        ("pythonic", "<think>[f()]", ..., ""),
        ("mistral", 'so [TOOL_CALLS] [{"name": "f", "arguments": {"x": "]</think>"}}] and', "so  and", "f"),
        ("mistral", "<think>[TOOL_CALLS] [1]", ..., ""),
        ("olmo", "<function_calls>f(x='a</function_calls>b')\ng(y=\"'</think>\")</function_calls> so", " so", "fg"),
        ("olmo", "<function_calls>f(x='a)</function_calls> so", " so", "!"),
    ],
)  # fmt: skip
def test_a_turn_is_thoughts_words_calls_words(form, text, words, names):
    """Words may be the whole text (...). In names, ! stands for a call that cannot be read."""
    said, calls = read_turn(text, form)
    assert said == (text if words is ... else words) and "".join(call.name or "!" for call in calls) == names
    assert [call.error for call in calls if call.name] == [""] * len(names.replace("!", ""))


@pytest.mark.parametrize("form", FORMATS)
def test_a_thought_that_the_template_opened_calls_nothing(form):
    call = {"hermes": F, "llama": LLAMA, "pythonic": "[f()]", "mistral": '[TOOL_CALLS] [{"name": "f"}]'}
    call = (call | {"olmo": "<function_calls>f()</function_calls>", "glm": 'f\n{"x": 1}'})[form]
    assert not read_calls(call, form, is_thinking=True) and len(read_calls(call, form)) == 1
    assert named(read_calls(f"{call} no</think>\n{call}", form, is_thinking=True)) == named(read_calls(call, form))


def test_a_drawn_id_is_kept_and_others_are_made():
    text = '[TOOL_CALLS] [{"name": "f", "id": "abcdefghi"}, {"name": "g", "id": "1"}]'
    assert [call.number for call in read_calls(text, "mistral")] == ["abcdefghi", "100000001"]


@pytest.mark.parametrize(
    ("form", "text", "why"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {</tool_call>', "Expecting property name"),
        ("hermes", "<tool_call>[]</tool_call>", "it is not an object such as"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "its arguments are not an object"),
        ("hermes", "<tool_call>" + "[" * 100_000, "recursion"),
        ("llama", '<|python_tag|>print("a")', "it is not a JSON object"),
        ("llama", '{"name": "f", "parameters": ', "Expecting value"),
        ("mistral", '[TOOL_CALLS] {"name": "f"}', "it is not a list of calls"),
        ("mistral", "[TOOL_CALLS] [{", "Expecting property name"),
        ("pythonic", "[f(1)]", "is not a call with named arguments"),
        ("pythonic", "[f(x=g())]", "an argument that is not a plain value"),
        ("pythonic", "[f(x=1", "it is not a list of calls"),
        ("olmo", "<function_calls>f(x=", "it is not a line with a call"),
        ("olmo", "<function_calls>f(x=y)</function_calls>", "an argument that is not a plain value"),
        ("glm", 'f\n{"x": ', "Expecting value"),
    ],
)
def test_a_malformed_call_is_an_error_for_the_model_and_no_failure(form, text, why):
    (call,) = read_calls(text, form)
    assert call.error.startswith("error: this tool call cannot be read: ") and why in call.error


@pytest.mark.parametrize("form", FORMATS)
def test_no_text_breaks_a_parser(form):
    import random

    draw = random.Random(3)
    parts = [
        "<tool_call>",
        "</tool_call>",
        "{",
        "}",
        '"name"',
        ": ",
        '"f"',
        "[",
        "]",
        "(",
        ")",
        "f",
        "=",
        "\0",
        "[TOOL_CALLS]",
    ]
    for _ in range(300):
        for call in read_calls("".join(draw.choices(parts, k=draw.randrange(12))), form):
            assert call.error or call.name
