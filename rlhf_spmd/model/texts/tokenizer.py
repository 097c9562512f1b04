"""Converts text to token ids and back, with the special ids of a model folder, and chooses a padding token.

The `tokenizers` package reads tokenizer.json in milliseconds; importing transformers takes seconds. Our own tensors are
padded with -1, so the padding token matters only in folders that transformers will read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from rlhf_spmd.errors import UserError
from rlhf_spmd.kernels.known_tokens import KnownTokens
from rlhf_spmd.model.config import ModelConfig, read_json
from rlhf_spmd.model.texts.tokenizer_files import BACKEND, CONFIG, NAMES, listed_tokens, read_backend, special_names
from rlhf_spmd.model.weights import write_json

SPECIAL = ("bos", "eos", "pad")  # kinds of special tokens, in the order of the fields of Tokenizer


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer and its special ids (None if it has no such token)."""

    folder: Path
    vocab_size: int  # added tokens included
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    _encode: Callable[[str, bool], list[int]]
    _decode: Callable[[list[int], bool], str]
    vocabulary: Callable[[], dict[str, int]]  # token -> id, including added tokens; the ids may have gaps
    num_after: int = 0  # special tokens that the tokenizer adds after a text

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Returns the token ids of a text; with `special`, including the special tokens that the tokenizer adds before
        it (such as a beginning of sequence; an end of sequence never is). If the text already begins with that token,
        as chat templates render it, no second one is added.
        """
        ids = self._encode(text, special)
        ids = ids[: len(ids) - self.num_after] if special else ids
        doubled = special and self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2
        return ids[1:] if doubled else ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Returns the text of tokens; with `special`, the special tokens stay visible. Negative ids (padding) are
        skipped."""
        return self._decode([int(i) for i in ids if i >= 0], special)

    def decode_pair(self, prompt: Sequence[int], response: Sequence[int]) -> tuple[str, str]:
        """Returns the texts of a prompt and its response; joined they give the whole text.

        They are decoded together because a decoder may change the beginning of a text: Llama 2's drops a space there.
        """
        before, whole = self.decode(prompt), self.decode([*prompt, *response])
        if whole.startswith(before):
            return before, whole[len(before) :]
        return before, self.decode(response)  # a character spans prompt and response

    def known(self, vocab_size: int) -> KnownTokens:
        """Returns the tokens that this tokenizer has, of a model with so many rows of embeddings."""
        ids = {token for token in self.vocabulary().values() if token < vocab_size}
        stop = max(ids, default=-1) + 1
        return KnownTokens(stop, tuple(token for token in range(stop) if token not in ids))

    def eos_ids(self, config: ModelConfig) -> tuple[int, ...]:
        """Returns the token ids that end a response: the model's, else the tokenizer's; empty if neither has one. The
        first is the one that ends given texts: the tokenizer's, if it is among them. Raises UserError for one that the
        tokenizer lacks, because it is never drawn."""
        own = () if self.eos_token_id is None else (self.eos_token_id,)
        ids = tuple(sorted(config.eos_token_ids, key=lambda token: token not in own)) or own
        if unknown := set(ids) - set(self.vocabulary().values()):
            raise UserError(
                f"the end of sequence {min(unknown)} (eos_token_id in {self.folder}/generation_config.json or "
                "config.json) is not a token of its tokenizer, so no response can end with it: write the id of a token "
                "or copy the tokenizer that belongs to the model"
            )
        return ids

    @classmethod
    def of_backend(cls, backend: Any, folder: Path) -> "Tokenizer":
        """Wraps a tokenizer of the package `tokenizers`. folder: with the files that name special tokens."""
        ids = {kind: backend.token_to_id(name) for kind, name in special_names(folder).items()}
        return cls._of(
            folder,
            backend.get_vocab_size(with_added_tokens=True),
            [ids.get(f"{kind}_token") for kind in SPECIAL],
            lambda text, special: backend.encode(text, add_special_tokens=special).ids,
            lambda ids, special: backend.decode(ids, skip_special_tokens=not special),
            backend.get_vocab,
        )

    @classmethod
    def from_transformers(cls, tokenizer: Any, folder: Path) -> "Tokenizer":
        """Wraps a tokenizer of transformers."""
        return cls._of(
            folder,
            len(tokenizer),
            [getattr(tokenizer, f"{kind}_token_id") for kind in SPECIAL],
            lambda text, special: tokenizer.encode(text, add_special_tokens=special),
            lambda ids, special: tokenizer.decode(ids, skip_special_tokens=not special),
            tokenizer.get_vocab,
        )

    @classmethod
    def _of(
        cls,
        folder: Path,
        vocab_size: int,
        special_ids: Sequence[int | None],
        encode: Callable[[str, bool], list[int]],
        decode: Callable[[list[int], bool], str],
        vocabulary: Callable[[], dict[str, int]],
    ) -> "Tokenizer":
        """Returns a tokenizer of functions.

        special_ids: of SPECIAL.
        """
        bos, eos, pad = special_ids
        num_after = _num_after(encode, vocabulary)
        return cls(folder, vocab_size, bos, eos, pad, encode, decode, vocabulary, num_after)


def _num_after(encode: Callable[[str, bool], list[int]], vocabulary: Callable[[], dict[str, int]]) -> int:
    """Returns how many special tokens a tokenizer adds after a text."""
    for text in ("a", *(vocabulary() if not encode("a", False) else ())):
        whole, plain = encode(text, True), encode(text, False)
        places = [place for place in range(len(whole)) if plain and whole[place : place + len(plain)] == plain]
        if len(places) == 1:  # a special token may be the text itself
            return len(whole) - places[0] - len(plain)
    return 0


def has_stop(decode: Callable[..., str], tokens: Sequence[int], stop: Sequence[str]) -> bool:
    """Returns whether the text of these tokens has one of the stop texts. Special tokens are not a part of the text,
    except for a stop text that is or contains one of them.

    decode: of a Tokenizer.
    """
    text = decode(tokens) if stop else ""
    if any(one in text for one in stop):
        return True
    shown = decode(tokens, special=True) if stop else ""
    found = [one for one in stop if one in shown]
    special = [decode([token], special=True) for token in tokens if found and not decode([token])]
    return any(token and token in one for token in special for one in found)


def padding_token(folder: Path, config: ModelConfig) -> int:
    """Returns the id to pad with; never an end of sequence, so "the last token that is not padding" is the last real
    token.

    The tokenizer's own padding token if it qualifies, else the model's, else another special token; then the tokenizer
    files in `folder` are changed to pad with it. Without a tokenizer: the model's, or the last possible id.
    """
    names = special_names(folder)
    added = _added_tokens(folder) if (folder / BACKEND).exists() else {}
    id_of = {text: number for number, (text, _) in added.items()}
    ends = {*config.eos_token_ids, id_of.get(names.get("eos_token", ""))}

    def allowed(token_id: int | None) -> TypeGuard[int]:
        return token_id is not None and 0 <= token_id < config.vocab_size and token_id not in ends

    pad = id_of.get(names.get("pad_token", ""))
    special = [number for number, (_, is_special) in added.items() if is_special and allowed(number)]
    if allowed(pad):
        return pad
    if allowed(config.pad_token_id) and (config.pad_token_id in added or not added):
        pad = config.pad_token_id
    elif special:
        texts = {number: added[number][0].lower() for number in special}
        pad = min(special, key=lambda number: ("pad" not in texts[number], "reserved" not in texts[number], number))
    else:
        return max(filter(allowed, range(config.vocab_size)), default=0)
    if pad in added:
        for path in (folder / CONFIG, folder / NAMES):
            if path.exists():
                write_json(path, read_json(path) | {"pad_token": added[pad][0]})
    return pad


def _added_tokens(folder: Path) -> dict[int, tuple[str, bool]]:
    """Returns the added tokens by id, and whether each is special."""
    backend = read_backend(folder).get_added_tokens_decoder()
    listed = {number: (text, bool(flags.get("special"))) for text, (number, flags) in listed_tokens(folder).items()}
    return {number: (token.content, token.special) for number, token in backend.items()} | listed
