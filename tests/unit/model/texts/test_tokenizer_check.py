"""Whether transformers and this program make the same tokens of a text: asked once, remembered, and refused if not."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_spmd.command_line.checks import tokenizer_findings
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import load_tokenizer
from rlhf_spmd.model.texts import tokenizer_check
from rlhf_spmd.model.texts.tokenizer_check import reading_note
from tests.folders import write_all
from tests.runs import load
from tests.unit.embedded.test_embedded import ACTOR, REWARD
from tests.unit.model.texts.test_tokenizer_files import copy, special


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch) -> Path:
    """Returns where this test remembers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rlhf_spmd" / "tokenizers"


def forbid(monkeypatch) -> None:
    def compared(folder):
        raise AssertionError(f"{folder} is compared")

    monkeypatch.setattr(tokenizer_check, "_compared", compared)


def sentencepiece(folder: Path, *, prepends: bool = True, **config) -> Path:
    """Returns a tokenizer as that of Llama 2, or without a '▁' in front of each piece of text."""
    from tokenizers import Tokenizer, models, normalizers, processors

    letters = sorted(set("Hello world a b c")) + ["▁"]
    octets = [f"<0x{octet:02X}>" for octet in range(256)]
    words = {text: index for index, text in enumerate(["<unk>", "<s>", "</s>", *octets, *letters, "▁a"])}
    tokenizer = Tokenizer(models.BPE(words, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    first = [normalizers.Prepend("▁")] if prepends else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | config), encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    return folder


def test_a_folder_is_compared_once_and_its_note_remembered(tmp_path, memory, monkeypatch):
    plain, llama = copy(tmp_path / "m", config={"model_max_length": 99}), sentencepiece(tmp_path / "llama")
    assert reading_note(plain) == ""
    note = reading_note(llama)
    assert "makes the tokens" in note and "its class for this model does not do what tokenizer.json says" in note
    assert len(list(memory.iterdir())) == 2
    forbid(monkeypatch)
    assert reading_note(plain) == "" and reading_note(llama) == note
    (plain / "added_tokens.json").write_text('{"<tool>": 1024}', encoding="utf-8")
    with pytest.raises(AssertionError, match="is compared"):
        reading_note(plain)
    next(memory.iterdir()).write_text("no JSON", encoding="utf-8")
    for file in memory.iterdir():
        file.write_text('{"note": 3}', encoding="utf-8")
    with pytest.raises(AssertionError, match="is compared"):
        reading_note(llama)


def test_embedded_tokenizers_are_never_compared(tmp_path, memory, monkeypatch):
    forbid(monkeypatch)
    assert reading_note(ACTOR) == reading_note(REWARD) == reading_note(shutil.copytree(ACTOR, tmp_path / "m")) == ""
    (tmp_path / "none").mkdir()
    assert reading_note(tmp_path / "none") == "" and not memory.exists()


def test_they_are_read_alike():
    folders = [path.parent for path in tokenizer_check.EMBEDDED.glob("*/*/tokenizer.json")]
    assert len(folders) == 5 and [tokenizer_check._compared(folder) for folder in folders] == [""] * 5


@pytest.mark.parametrize("home", ["file", "read only", "relative", "none"])
def test_a_home_that_cannot_be_used_is_no_error(home, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    places = {"file": str(tmp_path / "file"), "read only": "/proc/none", "relative": "cache", "none": ""}
    monkeypatch.setenv("XDG_CACHE_HOME", places[home])
    monkeypatch.chdir(tmp_path)
    if home in ("relative", "none"):  # the former does not count
        monkeypatch.setenv("HOME", str(tmp_path / "file"))
    if home == "none":

        def nowhere():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", nowhere)
    assert reading_note(copy(tmp_path / "m", config={"model_max_length": 98})) == ""
    assert not (tmp_path / "cache").exists()


def test_a_class_of_transformers_that_does_not_follow_tokenizer_json_is_told(tmp_path):
    from transformers import AutoTokenizer

    folder = sentencepiece(tmp_path / "m", prepends=False)
    note, ours = reading_note(folder), load_tokenizer(folder).encode("Hello world", special=False)
    theirs = AutoTokenizer.from_pretrained(folder).encode("Hello world", add_special_tokens=False)
    assert ours != theirs and f"the tokens {ours} of the text 'Hello world', and transformers {theirs}:" in note
    other = sentencepiece(tmp_path / "other", prepends=False, tokenizer_class="PreTrainedTokenizerFast")
    assert reading_note(other) == ""
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    assert reading_note(folder) == ""
    assert load_tokenizer(folder).encode("Hello world", special=False) == theirs


def test_files_that_are_read_in_two_ways_are_an_error(tmp_path, memory):
    folder = copy(tmp_path / "m", config={"split_special_tokens": True})
    with pytest.raises(
        UserError, match=r"the tokens \[0\] of the text '<\|pad\|>', and transformers \[30, .* write the"
    ):
        reading_note(folder)
    assert not memory.exists()  # so that the next try compares again


def test_what_only_transformers_assumes_is_told(tmp_path):
    unnamed = sentencepiece(tmp_path / "unnamed")
    names = json.loads((unnamed / "tokenizer_config.json").read_text(encoding="utf-8"))
    (unnamed / "tokenizer_config.json").write_text(
        json.dumps({k: v for k, v in names.items() if k != "eos_token"}), encoding="utf-8"
    )
    assert "does not name what transformers assumes: eos_token is 2" in reading_note(unnamed)
    unreadable = copy(tmp_path / "unreadable", config={"eos_token": special("<|end|>")})
    assert "transformers cannot read the tokenizer" in reading_note(unreadable)


def test_ids_of_special_tokens_are_compared(tmp_path):
    folder = copy(tmp_path / "m", config={"added_tokens_decoder": {"1024": special("<|im_end|>")}})
    ours = load_tokenizer(folder)
    theirs = dataclasses.replace(ours, eos_token_id=1024)
    assert (
        tokenizer_check._difference(ours, theirs) == "the id of eos_token is 2 by its files, and 1024 in transformers"
    )
    blind = load_tokenizer(ACTOR)
    found = tokenizer_check._difference(dataclasses.replace(blind, added=()), ours)
    assert "of the text '<|im_end|>', and transformers [1024]" in found


def test_check_says_it_and_a_warm_start_imports_nothing_heavy(tmp_path, memory):
    """`check` and the start of a run, in processes of their own, once the tokenizers are known."""
    overrides = write_all(tmp_path / "folders")
    for folder in ("actor", "reward"):
        assert reading_note(tmp_path / "folders" / folder) == ""
    check = ["check", "flattening", "--layout", "1x1", "iterations=1", *overrides]
    program = f"""
import sys
from rlhf_spmd.__main__ import main
assert main({check!r}) == 0
assert not {{"torch", "transformers"}} & set(sys.modules)
from tests.runs import RunOf, load
RunOf(load({overrides!r}))
assert "torch" in sys.modules and "transformers" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr


def test_check_warns_and_refuses(tmp_path):
    (finding,) = tokenizer_findings(load([f"models.actor={sentencepiece(tmp_path / 'llama')}"]))
    assert finding.severity == "warning" and "does not do what tokenizer.json says" in finding.message
    refused = load([f"models.actor={copy(tmp_path / 'm', config={'split_special_tokens': True})}"])
    with pytest.raises(UserError, match="and transformers"):
        tokenizer_findings(refused)
