"""Texts of a prompt and its response: they join to what both say together."""

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from rlhf_spmd.model.tokenizer import Tokenizer


def llama2(tmp_path) -> Tokenizer:
    """The decoder of Llama 2: a word's space is its first character, and the one that starts a text is dropped."""
    words = ["<unk>", "\u2581hello", "\u2581world", "\u2581how", "<0xE2>", "<0x82>", "<0xAC>"]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer.from_json(tmp_path)


def test_a_response_keeps_the_space_before_its_first_word(tmp_path):
    tokenizer = llama2(tmp_path)
    assert tokenizer.decode([3]) == "how"  # alone it has lost it
    assert tokenizer.decode_pair([1, 2], [3, 1]) == ("hello world", " how hello")
    assert tokenizer.decode_pair([1], []) == ("hello", "")


def test_a_character_across_the_border_belongs_to_nobody(tmp_path):
    prompt, response = llama2(tmp_path).decode_pair([1, 4, 5], [6])
    assert prompt.startswith("hello") and "\u20ac" not in prompt + response
