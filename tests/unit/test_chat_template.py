"""Prompts that are conversations, with a tokenizer's template as transformers renders it."""

import json

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import ChatTemplate, load_tokenizer
from rlhf_spmd.runtime.data.prompts import load_prompts
from tests.folders import write_model

TEMPLATE = (
    "<s>{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}ba{% endif %}"
)
CHAT = [{"role": "da", "content": "de di"}, {"role": "do", "content": "du"}]


def test_it_is_rendered_as_transformers_does_with_one_beginning(tmp_path):
    from transformers import AutoTokenizer

    folder = write_model(tmp_path / "lm")
    names = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"chat_template": TEMPLATE}), encoding="utf-8")
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": CHAT}) + "\n", encoding="utf-8")
    (tmp_path / "other.jinja").write_text("<s>bu", encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    found = load_prompts(tmp_path / "p.jsonl", tokenizer, max_prompt_tokens=20, render=ChatTemplate(folder).render)
    theirs = AutoTokenizer.from_pretrained(folder)
    wanted = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert list(found.prompts) == [wanted] and wanted.count(tokenizer.bos_token_id) == 1
    other = ChatTemplate(folder, str(tmp_path / "other.jinja")).render("here", CHAT)
    assert tokenizer.encode(other, special=False) == tokenizer.encode("<s>bu", special=False)


def test_what_is_missing_is_told(tmp_path):
    folder = write_model(tmp_path / "lm")
    with pytest.raises(UserError, match=r"p.jsonl, line 1: .* has no chat template; give data.chat_template=FILE"):
        ChatTemplate(folder).render("p.jsonl, line 1", CHAT)
    with pytest.raises(UserError, match=r"data.chat_template=no.jinja can't be read"):
        ChatTemplate(folder, "no.jinja")  # before, and although no prompt may be a conversation
    (tmp_path / "strict.jinja").write_text("{{ raise_exception('only user and assistant') }}", encoding="utf-8")
    with pytest.raises(UserError, match=r"line 1: the chat template does not take .*: only user and assistant"):
        ChatTemplate(folder, str(tmp_path / "strict.jinja")).render("p.jsonl, line 1", CHAT)
