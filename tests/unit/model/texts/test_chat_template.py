"""Prompts that are conversations, with a tokenizer's template as transformers renders it, but at a time of its own."""

import inspect
import json

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import ChatTemplate, load_tokenizer
from rlhf_spmd.pages.option_values import RESERVED
from rlhf_spmd.runtime.data.prompts import load_prompts
from tests.folders import write_model

TEMPLATE = (
    "<s>{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}ba{% endif %}"
)
CHAT = [{"role": "da", "content": "de di"}, {"role": "do", "content": "du"}]
STARTED = "2026-02-03T23:59:58.000007+02:00"
ALL = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ enable_thinking }}{% for m in messages %}[{{ m.role }}]"
    "{{ m | tojson }}{{ m.content is defined }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "lm")


def template(folder, tmp_path, text: str, started: str = STARTED) -> ChatTemplate:
    (tmp_path / "t.jinja").write_text(text, encoding="utf-8")
    return ChatTemplate(folder, str(tmp_path / "t.jinja"), started=started)


def test_it_is_rendered_as_transformers_does_with_one_beginning(tmp_path):
    from transformers import AutoTokenizer

    folder = write_model(tmp_path / "lm")
    names = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"chat_template": TEMPLATE}), encoding="utf-8")
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": CHAT}) + "\n", encoding="utf-8")
    tokenizer, own = load_tokenizer(folder), ChatTemplate(folder, started=STARTED)
    found = load_prompts(tmp_path / "p.jsonl", tokenizer, max_prompt_tokens=20, render=own.render)
    theirs = AutoTokenizer.from_pretrained(folder)
    wanted = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert list(found.prompts) == [wanted] and wanted.count(tokenizer.bos_token_id) == 1
    other = template(folder, tmp_path, "<s>bu").render("here", CHAT)
    assert tokenizer.encode(other, special=False) == tokenizer.encode("<s>bu", special=False)
    assert not own.remarks({})


def test_tools_arguments_and_messages_reach_it_as_in_transformers(folder, tmp_path):
    """What messages have besides role and content, and calls of tools without any content."""
    from transformers import AutoTokenizer

    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1, "y": None}}}
    chat = [
        {"role": "user", "content": "de", "name": "di"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "du"},
        {"role": "tool", "content": "7", "tool_call_id": "1"},
        {"role": "assistant", "tool_calls": [call]},
    ]
    row = {"messages": [*chat, {"role": "assistant", "content": "fin"}], "tools": [call["function"]]}
    row["chat_template_kwargs"] = {"enable_thinking": False}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    made, tokenizer = template(folder, tmp_path, ALL), load_tokenizer(folder)
    given = {"render": made.render, "template_kwargs": {"enable_thinking": True}}
    prompts = load_prompts(tmp_path / "p.jsonl", tokenizer, max_prompt_tokens=999, **given)
    given = {"tools": row["tools"], "chat_template": ALL, "add_generation_prompt": True, "tokenize": False}
    wanted = AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, **given, enable_thinking=False)
    assert list(prompts.texts) == [wanted] and "False[user]" in wanted and "falsef" in wanted.lower()
    learned = load_prompts(
        tmp_path / "p.jsonl",
        tokenizer,
        max_prompt_tokens=999,
        max_response_tokens=999,
        columns={"responses": "completion"},
        turns="all",
        marks="own",
        render=made.render,
    )
    assert len(learned) == 1  # a turn that only calls a tool is not empty
    assert made.remarks({}) == ()


def test_reserved_names_are_those_of_transformers():
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

    taken = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
    taken |= {*inspect.signature(render_jinja_template).parameters}
    assert taken - {"documents", "kwargs"} <= {*RESERVED}
    own = {*_compile_jinja_template("").environment.globals} - {"range", "lipsum", "cycler", "joiner"}
    assert own <= {*RESERVED} and {"strftime_now", "messages"} <= {*RESERVED}


def test_what_is_missing_is_told(folder, tmp_path):
    with pytest.raises(UserError, match=r"p.jsonl, line 1: .* has no chat template; give data.chat_template=FILE"):
        ChatTemplate(folder, started=STARTED).render("p.jsonl, line 1", CHAT)
    with pytest.raises(UserError, match=r"data.chat_template=no.jinja can't be read"):
        ChatTemplate(folder, "no.jinja", started=STARTED)  # before, and although no prompt may be a conversation
    refused = {
        "{{ raise_exception('only user and assistant') }}": "only user and assistant",
        "{{ messages | random }}": "it uses random numbers",
        "{{ lipsum() }}": "it uses random numbers",
    }
    for text, why in refused.items():
        with pytest.raises(UserError, match=rf"line 1: the chat template does not take .*: {why}"):
            template(folder, tmp_path, text).render("p.jsonl, line 1", CHAT)


def test_every_template_writes_the_time_of_the_start(folder, tmp_path):
    """Also two at a time with one text, which share their environment in transformers."""
    text = "{{ strftime_now('%d %b %Y %H:%M:%S.%f %j %%s %Z') }}"
    one, other = (template(folder, tmp_path, text, started) for started in (STARTED, "2025-01-01T00:00:00"))
    for _ in range(2):
        assert one.render("here", CHAT) == "03 Feb 2026 23:59:58.000007 034 %s "
        assert other.render("here", CHAT) == "01 Jan 2025 00:00:00.000000 001 %s "
    assert other.remarks({}) == ("the chat template writes the time 2025-01-01 00:00",)
