"""The file of offline generation: how responses are dealt, how they ended, and what becomes of a broken run's file."""

import json
from pathlib import Path

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.texts.tokenizer import Tokenizer
from rlhf_spmd.runtime.generation.requests import Sampling
from rlhf_spmd.runtime.offline.generate_file import check_out, deal, line_of, merge_in_order, replacing
from rlhf_spmd.runtime.offline.options import load_options
from rlhf_spmd.runtime.offline.prompts import Prompt, read_offline_prompts

CONTEXT = 32


def config(**changes) -> ModelConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    shape = {"model_type": "llama", "vocab_size": 63, "head_dim": 16, "max_position_embeddings": CONTEXT}
    return ModelConfig(**(sizes | shape | changes))


def prompts_of(folder: Path, lines: list[dict], tokenizer: Tokenizer, *words: str, **model) -> list[Prompt]:
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    options = load_options(["generation.max_new_tokens=8", *words])
    return read_offline_prompts(path, tokenizer, config(**model), options)


# ---- dealing and writing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 2, 7, 12, 13, 30])
@pytest.mark.parametrize("copies", [1, 2, 4])
@pytest.mark.parametrize(("samples", "window"), [(1, 3), (3, 2), (2, 50)])
def test_what_is_dealt_comes_back_in_order(num, copies, samples, window):
    prompts = list(range(num))
    hands = [deal(prompts, copy, copies, window) for copy in range(copies)]
    found = []
    for _ in range(0, num, window * copies):
        lines = [[(p, s) for p in next(hand, []) for s in range(samples)] for hand in hands]
        assert max(map(len, lines)) <= window * samples
        found += merge_in_order(lines, samples)
    assert found == [(p, s) for p in prompts for s in range(samples)]
    assert all(next(hand, None) is None for hand in hands)


@pytest.mark.parametrize(
    ("response", "stop", "finish"),
    [
        ([5, 6, 1], (), "eos"),
        ([5, 6, 7, 1], (), "eos"),
        ([5, 6, 7, 8], (), "length"),
        ([5, 6, 7, 8], ("du",), "length"),
        ([5, 6, 7], ("bu",), "stop"),
        ([5, 6, 7, 8], ("da",), "stop"),
        ([5, 6, 7, 0], ("<s>",), "stop"),  # a special token, which the text does not show
        ([5, 6, 7, 0], ("bu <s>",), "stop"),
        ([5, 6, 7, 0], ("s>",), "length"),
    ],
)
def test_how_a_response_ended(tokenizer, response, stop, finish):
    prompt = Prompt(0, "ba", [3], Sampling(4, stop=stop))
    line = line_of(prompt, response, -1.23456789, tokenizer, (1,))
    assert (line["finish"], line["num_tokens"], line["logprob"]) == (finish, len(response), -1.2346)
    assert (line["prompt"], line["response"].split()) == (
        "ba",
        ["bi", "bo", "bu", "da"][: len(response) - (response[-1] < 2)],
    )


def test_the_file_gets_its_name_at_the_end(tmp_path):
    (tmp_path / "out.jsonl.part").write_text("half\n", encoding="utf-8")  # of a broken run
    with replacing(tmp_path / "out.jsonl") as file:
        file.write("é")
        assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl.part"]
    assert (tmp_path / "out.jsonl").read_text(encoding="utf-8") == "é"
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "other.jsonl") as file:
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_where_the_file_must_not_go(tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("", encoding="utf-8")
    (tmp_path / "link.jsonl").symlink_to(prompts)
    for name, overwrite, message in (
        ("link.jsonl", True, "is the prompt file"),
        (".", True, "is a folder"),
        ("no/out.jsonl", True, "there is no folder"),
    ):
        with pytest.raises(UserError, match=message):
            check_out(tmp_path / name, prompts, overwrite=overwrite)
    (tmp_path / "old.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="exists.*--overwrite"):
        check_out(tmp_path / "old.jsonl", prompts, overwrite=False)
    check_out(tmp_path / "old.jsonl", prompts, overwrite=True)
