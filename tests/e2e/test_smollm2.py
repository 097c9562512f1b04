"""A real small language model: SmolLM2-135M-Instruct, converted from GGUF (about a minute and 4 GB of memory).

make test-smollm2    # fetches and converts it first
"""

import os
from pathlib import Path

import pytest
import torch

from rlhf_spmd.model import hf
from tests.folders import save_model

FOLDER = os.environ.get("RLHF_SPMD_SMOLLM2", "")
pytestmark = pytest.mark.skipif(not FOLDER, reason="make test-smollm2 runs it")
TEXTS = (
    "The history of rotary position embeddings begins with the observation that attention has no sense of order.",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28",
)


@torch.no_grad()
def test_no_further_from_float64_than_transformers():
    """In float32 our logits err at most twice as much as transformers' (eager), whichever float64 counts as exact:
    ours, or transformers' (which keeps norms and rope angles in float32)."""
    from transformers import AutoModelForCausalLM

    tokenizer = hf.load_tokenizer(FOLDER)
    rows = [torch.tensor([tokenizer.encode(text)]) for text in TEXTS]

    def ours(dtype: torch.dtype) -> list[torch.Tensor]:
        model = hf.load_model(FOLDER, head="lm", dtype=dtype)
        return [model.logits(model(row)) for row in rows]

    def theirs(dtype: torch.dtype) -> list[torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype, attn_implementation="eager").eval()
        return [model(row).logits for row in rows]

    def error(got: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
        return max((a - b).abs().max().item() for a, b in zip(got, exact, strict=True))

    mine, other = ours(torch.float32), theirs(torch.float32)
    for whose, exact in {"our": ours(torch.float64), "transformers'": theirs(torch.float64)}.items():
        our_error, their_error = error(mine, exact), error(other, exact)
        print(
            f"largest error of a logit against {whose} float64: ours {our_error:.2e}, transformers' {their_error:.2e}"
        )
        assert our_error <= 2 * their_error < 1e-2


@torch.no_grad()
def test_it_answers():
    """Greedy decoding of a chat prompt through our tokenizer gives the sense that the model has."""
    tokenizer, mine = hf.load_tokenizer(FOLDER), hf.load_model(FOLDER, head="lm")
    ids = tokenizer.encode(TEXTS[1])
    for _ in range(12):
        ids.append(int(mine.logits(mine(torch.tensor([ids]))[0, -1]).argmax()))
        if ids[-1] in mine.config.eos_token_ids:
            break
    assert "Paris" in tokenizer.decode(ids)


def test_round_trip(tmp_path):
    """Saved again, transformers loads it; a reward model pads with another token than the end of sequence."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    mine = hf.load_model(FOLDER, head="lm")
    save_model(mine, tmp_path / "lm", beside=hf.Texts(FOLDER), max_shard_bytes=200 * 2**20)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "lm")
    assert torch.equal(model.model.embed_tokens.weight, mine.embed_tokens.weight)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "lm")
    for text in TEXTS:
        assert tokenizer.encode(text) == hf.load_tokenizer(Path(FOLDER)).encode(text)
    save_model(hf.load_model(FOLDER, head="scalar"), tmp_path / "reward", beside=hf.Texts(FOLDER))
    padding = AutoTokenizer.from_pretrained(tmp_path / "reward").pad_token_id
    assert padding == hf.read_config(tmp_path / "reward").pad_token_id
    assert padding not in mine.config.eos_token_ids
