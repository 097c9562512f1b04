"""Added tokens and special names of all files of a tokenizer, as transformers reads them; which tokenizers are one."""

import json
import shutil
from pathlib import Path

import pytest

from rlhf_spmd.config.model_folders import folder_of, same_tokenizer
from rlhf_spmd.config.presets import load
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import load_tokenizer
from tests.unit.embedded.test_embedded import ACTOR

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
LISTED = "added_tokens_decoder"


def token(text: str, **flags: bool) -> dict:
    return dict.fromkeys(["lstrip", "rstrip", "normalized", "single_word"], False) | {"content": text} | flags


def special(text: str, **flags: bool) -> dict:
    return token(text, special=True, **flags)


def rewrite(path: Path, change, **how) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(change(values) or values, **how), encoding="utf-8")


def copy(folder: Path, source: Path = ACTOR, config=None, names=None, added=None, change=None) -> Path:
    """Copies the embedded tokenizer of 1,024 tokens with other files.

    config: over tokenizer_config.json.
    names, added: what special_tokens_map.json and added_tokens.json hold.
    change: of tokenizer.json.
    """
    folder.mkdir(parents=True)
    for name in FILES:
        shutil.copy(source / name, folder)
    rewrite(folder / "tokenizer_config.json", lambda values: values | (config or {}))
    for name, values in (("special_tokens_map.json", names), ("added_tokens.json", added)):
        if values is not None:
            (folder / name).write_text(json.dumps(values), encoding="utf-8")
    if change is not None:
        rewrite(folder / "tokenizer.json", change)
    return folder


def not_special(values: dict) -> None:
    values["added_tokens"][2]["special"] = False


CHAT = {"1024": special("<|im_start|>", lstrip=True), "1025": special("<|im_end|>", rstrip=True)}
FOLDERS = {
    "listed in tokenizer_config.json": {"config": {LISTED: CHAT, "eos_token": "<|im_end|>"}},
    "listed without being special": {"config": {LISTED: {"1024": token("<tool>", special=False)}}},
    "single words": {"config": {LISTED: {"1024": special("user", single_word=True)}}},
    "other flags than in tokenizer.json": {"config": {LISTED: {"0": special("<|pad|>", lstrip=True)}}},
    "added_tokens.json": {"added": {"<tool>": 1024, "<|im_end|>": 1025}, "names": {"eos_token": "<|im_end|>"}},
    "added_tokens.json that is not read": {"config": {LISTED: CHAT}, "added": {"<tool>": 1024}},
    "names that contradict": {"names": {"eos_token": "<|pad|>"}},
    "names that are not read": {"config": {LISTED: CHAT}, "names": {"eos_token": "<|pad|>"}},
    "a name of a new token": {"config": {"eos_token": special("<|im_end|>", lstrip=True) | {"__type": "AddedToken"}}},
    "a name of a token of the vocabulary": {"config": {"unk_token": "!"}},
    "a name of a token that is not special": {"change": not_special},
    "no name": {"config": {"pad_token": None}},
    "further special tokens": {"config": {"additional_special_tokens": ["<|u|>"], "image_token": "<img>"}},
    "further special tokens in both files": {
        "config": {"additional_special_tokens": ["<|u|>"]},
        "names": {"additional_special_tokens": ["<|v|>"]},
    },
    "further special tokens with names": {"config": {"extra_special_tokens": {"a_token": "<|u|>"}}},
}


@pytest.mark.parametrize("name", FOLDERS)
def test_all_files_are_read_as_transformers_reads_them(name, tmp_path):
    from transformers import AutoTokenizer

    folder = copy(tmp_path / "m", **FOLDERS[name])
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.vocabulary() == theirs.get_vocab() and ours.vocab_size == len(theirs)
    kinds = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert [getattr(ours, kind) for kind in kinds] == [getattr(theirs, kind) for kind in kinds]
    for text in theirs.added_tokens_encoder:
        for written, more in ((text, False), (f"On {text} Sunday{text}s {text} \n", True)):
            ids = theirs.encode(written, add_special_tokens=more)
            assert ours.encode(written, special=more) == ids
            for shown in (False, True):
                assert ours.decode(ids, special=shown) == theirs.decode(ids, skip_special_tokens=not shown)


def test_ids_that_disagree_are_refused(tmp_path):
    folder = copy(tmp_path / "m", config={LISTED: {"7": special("<|pad|>")}})
    with pytest.raises(UserError, match=r"tokenizer_config.json gives the token '<\|pad\|>' the id 7, .* it is 0;"):
        load_tokenizer(folder)


# ---- one tokenizer or another ---------------------------------------------------------------------------------------


def older(values: dict) -> None:
    """Rewrites values as older versions of the package `tokenizers` write them."""
    model = values["model"]
    model["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    del model["ignore_merges"], model["byte_fallback"], values["pre_tokenizer"]["use_regex"]


def reordered(values: dict) -> dict:
    values["model"]["vocab"] = dict(reversed(values["model"]["vocab"].items()))
    values["added_tokens"].reverse()
    return dict(reversed(values.items()))


def offsets(values: dict) -> None:
    values["pre_tokenizer"]["trim_offsets"] = not values["pre_tokenizer"]["trim_offsets"]
    values["decoder"]["add_prefix_space"] = not values["decoder"]["add_prefix_space"]


def swapped(values: dict) -> None:
    merges = values["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def traded(values: dict) -> None:
    words = values["model"]["vocab"]
    words["!"], words["A"] = words["A"], words["!"]


def with_flag(values: dict) -> None:
    values["added_tokens"][1]["lstrip"] = True


def without_beginning(values: dict) -> None:
    values["post_processor"] = None


def with_a_space(values: dict) -> None:
    values["pre_tokenizer"]["add_prefix_space"] = True


PAIRS = {
    "an older version": (True, {"change": older}),
    "another order": (True, {"change": reordered}),
    "offsets": (True, {"change": offsets}),
    "another chat template and padding": (
        True,
        {"config": {"chat_template": "x", "pad_token": "!", "model_max_length": 9}},
    ),
    "another end": (True, {"config": {"eos_token": "<|pad|>"}}),
    "merges": (False, {"change": swapped}),
    "ids": (False, {"change": traded}),
    "a token more": (False, {"config": {LISTED: CHAT}}),
    "a flag": (False, {"change": with_flag}),
    "post-processor": (False, {"change": without_beginning}),
    "pre-tokenizer": (False, {"change": with_a_space}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_tokenizers_are_compared_by_what_they_do(name, tmp_path):
    same, files = PAIRS[name]
    other = copy(tmp_path / "m", **files)
    assert (other / "tokenizer.json").read_bytes() != (ACTOR / "tokenizer.json").read_bytes() or "change" not in files
    assert same_tokenizer(str(other), str(ACTOR)) == same_tokenizer(str(ACTOR), str(other)) == same


def test_without_tokenizer_json(tmp_path):
    """The vocabulary tells; nothing is known of a folder without any."""
    words, others = {"a": 0, "b": 1, "</s>": 2}, {"a": 1, "b": 0, "</s>": 2}
    for name, vocabulary, end in (
        ("one", words, "</s>"),
        ("two", words, "</s>"),
        ("three", others, "</s>"),
        ("four", {}, "b"),
    ):
        (tmp_path / name).mkdir()
        if vocabulary:
            (tmp_path / name / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
            (tmp_path / name / "merges.txt").write_text("a b\n", encoding="utf-8")
        about = {"eos_token": end, "tokenizer_class": "GPT2Tokenizer"}
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    one, two, three, four = (str(tmp_path / name) for name in ("one", "two", "three", "four"))
    assert same_tokenizer(one, two) and not same_tokenizer(one, three)
    assert not same_tokenizer(four, str(tmp_path / "none")) and not same_tokenizer(four, one)
    assert not same_tokenizer("", one) and not same_tokenizer(str(ACTOR), one)


def test_the_critic_starts_from_a_reward_model_whose_tokenizer_is_written_otherwise(tmp_path):
    config = load("tiny", [])
    other = copy(tmp_path / "m", change=older)
    folders = dict(config.models) | {"reward": str(other)}
    assert folder_of("critic", folders, config.algorithm.roles) == str(other)
    rewrite(other / "tokenizer.json", traded)
    assert folder_of("critic", folders, config.algorithm.roles) == config.main_folder
