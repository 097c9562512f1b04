"""Everything that a row says comes out of the chat template, or a refusal or the heading says what does not."""

import json

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import ChatTemplate, load_tokenizer
from rlhf_spmd.runtime.run.inputs import load_rendered
from tests.templates import ALL_SPECIAL, ENDS, HERE, STARTED, write_bytes_tokenizer

CALL = {"type": "function", "id": "000000007", "function": {"name": "fcall", "arguments": {"place": "Xfcall"}}}
OWN = {  # templates of the test beside those of the folder
    "plain": "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "three roles": "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}[{{ m.role }}]{{ m.content }}"
    "<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "without thoughts": "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "the last line and what follows a word": "{% for m in messages %}[{{ m.role }}]"
    "{{ m.content.split('\n')[-1].split('FINAL')[-1] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "first call": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function | tojson }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "adds arguments to text": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + c.function.arguments }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "writes arguments as they are": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or []"
    " %}{{ c.function.name }} {{ c.function.arguments }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
}


def told(role: str, **more) -> dict:
    return {"role": role, "content": f"X{role}", **more}


ASK, ANSWER = told("user"), told("assistant")
SAID = {  # what a conversation says beside the question and the answer, all of it marked by X
    "a thought": [ASK, told("assistant") | {"content": "<think>\nXthought\n</think>\n\nXassistant"}],
    "reasoning": [ASK, told("assistant", reasoning_content="Xreasoning")],
    "an earlier thought": [ASK, told("assistant") | {"content": "<think>Xthought</think>Xearly"}, ASK, ANSWER],
    "an earlier reasoning": [ASK, told("assistant", reasoning_content="Xreasoning"), ASK, ANSWER],
    "a call": [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
    "a call and words": [ASK, told("assistant", tool_calls=[CALL])],
    "two calls": [ASK, told("assistant", tool_calls=[CALL, json.loads(json.dumps(CALL).replace("fcall", "other"))])],
    "an answered call": [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, told("tool"), ANSWER],
    "a system message": [told("system"), ASK, ANSWER],
    "a developer": [told("developer"), ASK, ANSWER],
    "a name": [told("user", name="Xname"), ANSWER],
    "another key": [ASK, told("assistant", seen=["Xseen"], turn=3)],
    "lines": [told("user") | {"content": "Xone\nXtwo"}, ANSWER],
    "a word": [ASK, told("assistant") | {"content": "Xone FINAL Xtwo"}],
}
ROADS = ("sft", "sft of all turns", "prompt and completion", "dpo", "rl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bytes_tokenizer(tmp_path_factory.mktemp("tokenizer"), special=ALL_SPECIAL)


def read(folder, file, road: str, messages: list, template: str, end: str) -> tuple[str, tuple[str, ...]]:
    """Returns all that is read of a row by one of the roads, and the notes."""
    tokenizer = load_tokenizer(folder)
    row, how = {"messages": messages}, {"columns": {"response": "completion"}, "marks": "own"}
    if road == "sft of all turns":
        how["turns"] = "all"
    elif road == "prompt and completion":
        row = {"prompt": messages[:-1], "completion": messages[-1:]}
    elif road == "dpo":
        row = {"chosen": messages, "rejected": [*messages[:-1], {"role": "assistant", "content": "no"}]}
        how = {"columns": {"better": "chosen", "worse": "rejected"}}
    elif road == "rl":
        row, how = {"prompt": messages[:-1]}, {}
    file.write_text(json.dumps(row), encoding="utf-8")
    made = ChatTemplate(folder, template, started=STARTED)
    limits = {"max_prompt_tokens": 9999, "max_response_tokens": 9999, "eos_ids": (tokenizer.vocabulary()[end],)}
    found = load_rendered(file, tokenizer, made, {}, **limits, **how)
    tokens = [*found.prompts[0], *(token for rows in found.responses.values() for token in rows[0])]
    return tokenizer.decode(tokens, special=True), found.remarks


@pytest.mark.parametrize(
    ("name", "road"),
    [(name, ROADS[(number + more) % len(ROADS)]) for number, name in enumerate([*ENDS, *OWN]) for more in (0, 2)],
)
def test_what_is_said_comes_out_or_is_told(name, road, folder, tmp_path):
    template, end = HERE / f"{name}.jinja", ENDS.get(name, "<|im_end|>")
    if name in OWN:
        template = tmp_path / "own.jinja"
        template.write_text(OWN[name], encoding="utf-8")
    for what, messages in SAID.items():
        kept = messages[:-1] if road == "rl" else messages
        texts = {word for word in json.dumps(kept).replace("\\n", " ").replace('"', " ").split() if word[0] == "X"}
        texts = {text.partition("<")[0] for text in texts} | {
            word for word in ("Xthought", "Xearly") if word in str(kept)
        }
        try:
            text, notes = read(folder, tmp_path / "row.jsonl", road, messages, str(template), end)
        except UserError as error:
            assert "row.jsonl, line 1: the chat template do" in str(error), error
            assert "does not write" in str(error) or "does not take" in str(error) or "only add" in str(error), error
            refused = [word for word in ("not write", "not take") if word in str(error)]
            assert not (refused == ["not write"] and what == "a name"), error  # which is told
            continue
        gone = [word for word in texts if word not in text]
        assert not gone or any("the chat template does not write" in note for note in notes), (what, gone, text, notes)
        if "arguments" in name and "Xfcall" in texts:
            assert '{"place": "Xfcall"}' in text  # as JSON


CHANGED = {  # what a template makes of a text -> a text that it changes; empty: white space alone
    "m.content[:30]": "Xone " * 20,
    "m.content[-30:]": "Xone " * 20,
    "m.content | truncate(20)": "Xone " * 20,
    "m.content | upper": "Xone",
    "m.content | e": "if a < b",
    "m.content | striptags": "if a < b and c > d",
    "m.content.rstrip('.')": "Xone.",
    "m.content | trim": "",
    "m.content.split() | join(' ')": "",
}


@pytest.mark.parametrize("made", CHANGED)
def test_a_template_that_changes_what_is_learned_is_refused(made, folder, tmp_path):
    """Marks of nine digits outlive what shortens long texts and changes letters, so the row's own text is compared."""
    template, own = tmp_path / "own.jinja", CHANGED[made]
    template.write_text(OWN["plain"].replace("m.content", made), encoding="utf-8")
    short = told("user") | {"content": "9"}
    for place, name in enumerate(("system", "user", "assistant")):
        messages = [told("system") | {"content": "7"}, short, told("assistant") | {"content": "8"}]
        messages[place]["content"] = own or "\n  Xone\n\n Xtwo "
        for road in ROADS[:4] if name == "assistant" else ("sft", "prompt and completion", "rl"):
            where = folder, tmp_path / "row.jsonl", road, messages, str(template), "<|im_end|>"
            if own and name == "assistant":
                with pytest.raises(UserError, match=r"line 1: the chat template shortens or changes what message 3"):
                    read(*where)
                continue
            changed = any("shortens or changes what a message" in note and name in note for note in read(*where)[1])
            assert changed == bool(own), (made, name, road)


def test_a_key_that_is_false_and_a_second_reading_of_what_was_refused_are_told(folder, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text(OWN["three roles"], encoding="utf-8")
    made = ChatTemplate(folder, str(template), started=STARTED)
    for _ in range(2):
        with pytest.raises(UserError, match="does not write 'content' of message 1"):
            made.check("here", [told("system"), ASK, ANSWER], 2)
    made.check("here", [ASK, told("assistant", weight=0, training=False)], 1)
    assert made.remarks({}) == ("the chat template does not write 'training' of messages of the role assistant",)


def test_plain_conversations_are_never_refused_nor_noted(folder, tmp_path):
    for name, end in ENDS.items():
        for road in ROADS:
            file, template = tmp_path / "row.jsonl", str(HERE / f"{name}.jinja")
            text, notes = read(folder, file, road, [ASK, ANSWER, ASK, told("assistant", weight=1)], template, end)
            notes = [note for note in notes if "template" in note and "writes the time" not in note]
            assert "Xuser" in text and not notes, (name, road, notes)


def test_numbers_of_calls_are_no_words_and_tools_that_are_not_written_are_told(folder, tmp_path):
    asked = [ASK, told("assistant", tool_calls=[CALL | {"index": 0}])]
    tools = [{"type": "function", "function": {"name": "fcall"}}]
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% if messages[0].role == 'system' %}{{ tools }}{% endif %}" + OWN["first call"], encoding="utf-8"
    )
    for messages, noted in ((asked, True), ([told("system"), *asked], False)):
        made = ChatTemplate(folder, str(template), started=STARTED)
        made.check("here", messages, 1, tools=tools)
        assert made.remarks({}) == ("the chat template does not read 'tools'",) * noted


def test_ends_that_do_not_end_a_response_are_told(folder, tmp_path):
    messages = [ASK, ANSWER]
    for end, stop, noted in (("<|im_end|>", (), ""), ("<|eot|>", (), "<|im_end|>"), ("<|eot|>", ("<|im_end|>",), "")):
        (tmp_path / "row.jsonl").write_text(json.dumps({"messages": messages}), encoding="utf-8")
        tokenizer = load_tokenizer(folder)
        made = ChatTemplate(folder, str(HERE / "chatml.jinja"), started=STARTED)
        ids = (tokenizer.vocabulary()[end],)
        notes = load_rendered(tmp_path / "row.jsonl", tokenizer, made, {}, stop=stop, max_prompt_tokens=99, eos_ids=ids)
        turns = [note for note in notes.remarks if "end of a turn in the chat template" in note]
        assert len(turns) == bool(noted) and all(noted in note for note in turns)
        assert "the eos_token of the tokenizer ('</s>') does not end a response" in str(notes.remarks)
