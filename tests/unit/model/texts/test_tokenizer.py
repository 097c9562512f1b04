"""The special tokens that a tokenizer adds to a text, and those that end one."""

import dataclasses

import pytest
import tokenizers

from rlhf_spmd.model import hf
from rlhf_spmd.model.texts.tokenizer import has_stop
from rlhf_spmd.runtime.data.prompts import load_prompts
from tests.unit.embedded.test_embedded import ACTOR
from tests.unit.model.test_hf import make_tokenizer


@pytest.fixture
def folder(tmp_path):
    make_tokenizer(tmp_path)
    return tmp_path


def test_a_rendered_prompt_gets_no_second_beginning(folder):
    """Chat templates write the beginning of sequence into the text."""
    tokenizer = hf.load_tokenizer(folder)
    assert tokenizer.encode("<s> w7 w8") == tokenizer.encode("w7 w8") == [1, 7, 8]
    assert tokenizer.encode("<s> w7 w8", special=False) == [1, 7, 8]
    assert tokenizer.encode("w7 <s> <s> w8") == [1, 7, 1, 1, 8]  # elsewhere it is what the text says
    assert tokenizer.encode("") == [1] and tokenizer.encode("", special=False) == []


@pytest.mark.parametrize(
    ("own", "of_model", "ends"),
    [(2, (0, 2, 7), (2, 0, 7)), (2, (2, 0), (2, 0)), (2, (0, 7), (0, 7)), (2, (), (2,)), (None, (7, 0), (7, 0))],
)
def test_given_responses_learn_the_end_of_the_tokenizer(own, of_model, ends, tmp_path):
    """If it is among those of the model; as Llama 3.1 Instruct, whose model names three."""
    tokenizer = dataclasses.replace(hf.load_tokenizer(ACTOR), eos_token_id=own)
    found = tokenizer.eos_ids(dataclasses.replace(hf.read_config(ACTOR), eos_token_ids=of_model))
    assert found == ends
    (tmp_path / "a.jsonl").write_text('{"prompt": "On Sunday", "completion": " Dora left."}\n', encoding="utf-8")
    rows = load_prompts(
        tmp_path / "a.jsonl",
        tokenizer,
        max_prompt_tokens=20,
        max_response_tokens=20,
        columns={"responses": "completion"},
        eos_ids=found,
    )
    assert rows.responses["responses"][0][-1] == ends[0]


@pytest.mark.parametrize(
    ("text", "stop", "stops"),
    [
        ("Dora left.<|end|>", ["<|end|>"], True),
        ("Dora left.<|end|>", ["never", "left.<|end|>"], True),
        ("Dora left.<|end|>\n", ["<|end|>\n"], True),
        ("Dora left.<|end|>", ["<|pad|>"], False),
        ("Dora left.<|end|>", ["end", "|>", ".<|"], False),  # what a special token is called is no text
        ("Dora left.<|pad|> Anna", ["left. Anna"], True),  # as the text reads
        ("Dora left.", ["left"], True),
        ("Dora left.", ["<|end|>"], False),
        ("Dora left.", [], False),
    ],
)
def test_stop_texts_see_the_special_tokens_that_they_name(text, stop, stops):
    tokenizer = hf.load_tokenizer(ACTOR)
    tokens = tokenizer.encode(text, special=False)
    assert has_stop(tokenizer.decode, tokens, stop) == stops


@pytest.mark.parametrize(("single", "before"), [("$A </s>", []), ("<s> $A </s>", [1]), ("<s> $A", [1]), ("$A", [])])
def test_no_text_ends_with_an_end_that_the_tokenizer_adds(single, before, tmp_path):
    from tokenizers import processors
    from transformers import AutoTokenizer

    make_tokenizer(tmp_path)
    file = str(tmp_path / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(file)
    names = [(name, backend.token_to_id(name)) for name in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=names)
    backend.save(file)
    theirs = hf.Tokenizer.from_transformers(AutoTokenizer.from_pretrained(tmp_path), tmp_path)
    for tokenizer in (hf.load_tokenizer(tmp_path), theirs):
        assert tokenizer.encode("w7 w8") == [*before, 7, 8] and tokenizer.encode("") == before
        assert tokenizer.encode("w7 </s>") == [*before, 7, 2]  # as the text says
    (tmp_path / "a.jsonl").write_text('{"prompt": "w7", "completion": " w8"}\n', encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "w7 w8"}\n', encoding="utf-8")
    (tmp_path / "c.jsonl").write_text('{"prompt": "w7", "chosen": " w8", "rejected": " w9"}\n', encoding="utf-8")
    limits = {"max_prompt_tokens": 9, "max_response_tokens": 9, "eos_ids": (2,)}
    for name, columns in {"a": ["completion"], "b": ["completion"], "c": ["chosen", "rejected"]}.items():
        given = limits | {"columns": dict(zip("xy", columns, strict=False))}
        read = load_prompts(tmp_path / f"{name}.jsonl", tokenizer, **given)
        assert [*read.prompts[0], *read.responses["x"][0]] == [*before, 7, 8, 2], name
