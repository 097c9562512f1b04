"""The samples of a run: what is shown of a prompt that a chat template has written."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from rlhf_spmd.model.hf import load_tokenizer
from rlhf_spmd.runtime.run.samples import said_last

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>", "[INST]"]
SPECIAL += ["[/INST]", "<|user|>", "<|assistant|>"]
QUESTION = "What is\n2 + 3 \u00f6?"
CHATML = "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
CHATML += f"Hi<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
LLAMA = "<s><|start_header_id|>system<|end_header_id|>\n\nYou are terse.<|eot_id|><|start_header_id|>user"
LLAMA += f"<|end_header_id|>\n\n{QUESTION}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One with a token for each byte, and these special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    folder = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        (CHATML, QUESTION),
        (CHATML + "<think>\n", QUESTION),
        (LLAMA, QUESTION),
        (f"<s>[INST]{QUESTION}[/INST]", QUESTION),
        (f"<|user|>\n{QUESTION}<|im_end|>\n<|assistant|>\n", QUESTION),
        (f"<s>{QUESTION}", ""),  # no conversation
        (QUESTION, ""),
        ("<s>[INST][/INST]", ""),
    ],
)
def test_the_last_words_of_the_user_are_shown(prompt, shown, tokenizer):
    assert said_last(tokenizer.encode(prompt, special=False), tokenizer) == shown
