"""What a reward model with another tokenizer reads: texts and conversations in its own tokens, as transformers makes
them, with its end of sequence where the response ended."""

import dataclasses
import json
from pathlib import Path

import pytest

from rlhf_spmd.model.hf import read_config
from rlhf_spmd.runtime.rewards.texts import RewardTexts
from tests.unit.embedded.test_embedded import REWARD
from tests.unit.model.texts.test_tokenizer_files import LISTED, copy, special

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LISTS = {LISTED: {"1024": special("<|im_start|>"), "1025": special("<|im_end|>")}, "eos_token": "<|im_end|>"}
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where did Dora go?"}]
PROMPT, RESPONSE = "On Sunday Dora", " went to Vienna by boat."
END, IM_START, IM_END = 2, 1024, 1025


def texts_of(folder: Path, ends: tuple[int, ...] = (2,), longest: int = 256, size: int = 1026) -> RewardTexts:
    shape = dataclasses.replace(
        read_config(REWARD), eos_token_ids=ends, max_position_embeddings=longest, vocab_size=size
    )
    return RewardTexts(str(folder), shape, "prompt", "reward", started="2026-02-03T23:59:58")


@pytest.fixture
def chat(tmp_path) -> Path:
    return copy(tmp_path / "chat", REWARD, config=LISTS | {"chat_template": CHATML})


def test_a_text_ends_where_the_response_did(tmp_path):
    from transformers import AutoTokenizer

    folder = copy(tmp_path / "m", REWARD)
    texts, theirs = texts_of(folder), AutoTokenizer.from_pretrained(folder)
    ids = theirs.encode(PROMPT + RESPONSE)
    assert texts.tokens(PROMPT, RESPONSE, ended=True, columns={}) == [*ids, END] == [*ids, theirs.eos_token_id]
    assert texts.tokens(PROMPT, RESPONSE, ended=False, columns={}) == ids
    conversation = {"prompt": ASKED}  # without a template of its own
    assert texts.tokens(PROMPT, RESPONSE, ended=True, columns=conversation) == [*ids, END]
    assert texts_of(folder, longest=4).tokens(PROMPT, RESPONSE, ended=True, columns={}) == [*ids, END][-4:]


@pytest.mark.parametrize("column", ["prompt", "messages"])
@pytest.mark.parametrize("messages", [ASKED, ASKED[1:], [*ASKED, {"role": "assistant", "content": "left out"}]])
def test_a_conversation_is_rendered_by_its_own_template(chat, column, messages):
    from transformers import AutoTokenizer

    texts, theirs = texts_of(chat), AutoTokenizer.from_pretrained(chat)
    before = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    whole = theirs.apply_chat_template([*before, {"role": "assistant", "content": RESPONSE}], return_dict=False)
    at = len(whole) - 1 - whole[::-1].index(IM_END)
    assert theirs.decode(whole[at:]) == "<|im_end|>\n"
    found = texts.tokens("not read", RESPONSE, ended=True, columns={column: messages})
    assert found == whole[: at + 1]
    cut = texts.tokens("not read", RESPONSE, ended=False, columns={column: messages})
    assert cut == whole[:at]  # without the end of the turn
    assert texts.tokens("a", "e", ended=False, columns={column: messages})[-1] not in (IM_START, IM_END)


def test_a_template_in_a_file_of_its_own_counts(tmp_path):
    folder = copy(tmp_path / "m", REWARD)
    (folder / "chat_template.jinja").write_text(json.dumps("x"), encoding="utf-8")
    assert texts_of(folder).template is not None
