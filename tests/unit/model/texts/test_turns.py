"""Joins of turns: by the templates of many families they give the tokens of the whole rendering."""

import random

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.texts.turns import TurnJoins, answer_of, tool_call
from tests.templates import ALL_SPECIAL, ENDS, joins_of, write_bytes_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
WORDS = ["lo", "look", " up", " 1,5", "\n\n", "é", "<b>", "  two", " {x}", "数", " end."]
NUMBER = "123456789"
WITH_TOOLS = ("chatml", "qwen3_kept", "llama3", "mistral", "granite", "olmo3")
OF_FAMILIES = ("smollm3", "phi4_mini", "phi4", "granite", "olmo2", "olmo3", "seed_oss", "ernie4_5", "glm4")


@pytest.fixture(scope="module", params=["bytes", "merges"])
def folder(request, tmp_path_factory):
    texts = (
        ["look up two ends. <think> assistant user tool_call arguments name"] * 9 if request.param == "merges" else []
    )
    return write_bytes_tokenizer(tmp_path_factory.mktemp("tokenizer"), *texts, special=ALL_SPECIAL)


def said_by(draw: random.Random) -> str:
    text = "".join(draw.choices(WORDS, k=draw.randrange(1, 7))).strip()
    return text or "yes"


def conversation(draw: random.Random, name: str, with_tools: bool) -> list[dict]:
    """Returns messages after the first one: answers of the assistant, and what comes back."""
    messages = []
    for _ in range(draw.randrange(1, 5)):
        content = said_by(draw)
        if name == "qwen3_kept" and draw.random() < 0.5:
            content = f"<think>\n{said_by(draw)}\n</think>\n\n{content}"
        turn = {"role": "assistant", "content": content}
        if with_tools and draw.random() < 0.7:
            turn["tool_calls"] = [tool_call("add", {"a": said_by(draw), "b": draw.randrange(99)}, NUMBER)]
            messages += [turn, answer_of("tool", said_by(draw), "add", NUMBER)]
        elif not with_tools or name != "mistral":  # whose template moves the tools to the last message of the user
            messages += [turn, answer_of("user", said_by(draw))]
    return messages


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("name", ["chatml", "qwen3_kept", "llama3", "mistral", "gemma", *OF_FAMILIES])
def test_joined_turns_are_the_whole_rendering_wherever_encoding_is_the_identity(name, with_tools, folder):
    if with_tools and name not in WITH_TOOLS:
        pytest.skip("the template has no tools")
    joins, tokenizer = joins_of(folder, name, TOOLS if with_tools else None)
    draw, same = random.Random(7), 0
    for _ in range(30):
        first = [{"role": "user", "content": said_by(draw)}]
        after = conversation(draw, name, with_tools)
        text = joins.render(first, True)
        ids = joins.encode(text)
        for place in range(0, len(after), 2):
            turn, back = after[place : place + 2]
            opened = joins.render([*first, *after[:place]], True)
            closed = joins.render([*first, *after[: place + 1]], False)
            assert closed.startswith(opened)
            said = closed[len(opened) :].removesuffix(joins.end)
            is_cut = draw.random() < 0.3  # at a limit, so that the end of the turn was not drawn
            drawn = [*joins.encode(said), *([] if is_cut else joins.encode(ENDS[name]))]
            added = joins.after(drawn, [back], turn.get("tool_calls", []))
            ids += drawn + added
        whole = joins.render([*first, *after], True)
        assert tokenizer.decode(ids, special=True) == tokenizer.decode(joins.encode(whole), special=True)
        same += ids == joins.encode(whole)
    least = 10 if name == "ernie4_5" else 20  # whose beginning of a turn ends with a space, which merges with words
    assert same >= (30 if len(tokenizer.vocabulary()) == 256 + len(ALL_SPECIAL) else least), same


def test_a_turn_that_was_cut_gets_its_end_and_one_that_ended_gets_no_second(folder):
    joins, tokenizer = joins_of(folder, "chatml")
    back = [answer_of("user", "go on")]
    (end,) = joins.encode("<|im_end|>")
    cut, ended = joins.after([65], back), joins.after([65, end], back)
    assert cut == [end, *ended]
    wanted = "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ended, special=True) == wanted


def test_several_tools_answer_one_turn_in_one_block(folder):
    joins, tokenizer = joins_of(folder, "chatml", TOOLS)
    calls = [tool_call("add", {}, NUMBER)] * 2
    added = joins.after([], [answer_of("tool", text, "add", NUMBER) for text in "ab"], calls)
    text = tokenizer.decode(added, special=True)
    assert text.count("<tool_response>") == 2 and text.count("<|im_start|>user") == 1


def test_several_calls_in_a_turn_of_a_template_that_writes_one(folder):
    joins, tokenizer = joins_of(folder, "llama3", TOOLS)
    calls = [tool_call("add", {}, NUMBER)] * 2
    added = joins.after([], [answer_of("tool", text, "add", NUMBER) for text in "ab"], calls)
    assert tokenizer.decode(added, special=True).count("<|start_header_id|>ipython") == 2


@pytest.mark.parametrize(
    ("name", "roles", "tools"),
    [
        *((name, ("user",), None) for name in ("chatml", "qwen3_kept", "llama3", "mistral", "gemma", *OF_FAMILIES)),
        *((name, ("tool",), TOOLS) for name in (*WITH_TOOLS, "glm4", "seed_oss")),
        ("chatml", ("user", "tool"), TOOLS),
    ],
)
def test_templates_that_only_add_are_taken(name, roles, tools, folder):
    joins_of(folder, name, tools)[0].check(roles)


@pytest.mark.parametrize(
    ("name", "roles", "tools", "why"),
    [
        ("qwen3_dropped", ("user",), None, "of a turn with its thinking changes when an answer of the user follows"),
        ("mistral", ("user",), TOOLS, "changes when an answer of the user follows"),
    ],
)
def test_templates_that_change_earlier_turns_are_refused_by_name(name, roles, tools, why, folder):
    with pytest.raises(UserError, match=f"template of {name} .*{why}.*data.chat_template=FILE"):
        joins_of(folder, name, tools)[0].check(roles)


def test_a_template_without_what_the_assistant_says_is_refused():
    joins = TurnJoins(lambda messages, answers: "x", lambda text: [1], frozenset(), "mine")
    with pytest.raises(UserError, match="template of mine .*does not write what the assistant said"):
        joins.after([], [answer_of("user", "a")])
