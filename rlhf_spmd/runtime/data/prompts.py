"""Prompts: read from a file, checked line by line, tokenised, and used in an order independent of the number of ranks.

First runs fail most often because of a bad prompt file, so every error names the file, the line and the fix.
"""

# B prompts in a batch, P prompt tokens (padded)

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.runtime_words import PROMPTS
from rlhf_spmd.runtime.data.readers import INSTEAD, Record, messages_of, read_records, text_of

if TYPE_CHECKING:
    import torch

    from rlhf_spmd.model.tokenizer import Tokenizer

Render = Callable[[str, list[dict[str, str]]], str]  # where (for messages), a conversation -> its text
HASHED_AT_ONCE = 10_000  # prompts
PADDING = -1  # never a token id, so it cannot be confused with an end of sequence that a tokenizer uses for padding


class PackedRows(Sequence):
    """A sequence of rows of different lengths, stored in one array without overhead per row."""

    def __init__(self, items: np.ndarray, ends: np.ndarray):
        """items: of all rows; ends: int64 [rows], where each row ends."""
        self.items, self.ends = items, ends

    @staticmethod
    def ends_of(rows: Sequence[Sized]) -> np.ndarray:
        """Where each of these rows ends, int64 [rows]."""
        return np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        return self._value(self.row(range(len(self))[index]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def row(self, index: int) -> np.ndarray:
        """The items of a row (0 <= index < len)."""
        return self.items[int(self.ends[index - 1]) if index else 0 : int(self.ends[index])]

    @abstractmethod
    def _value(self, row: np.ndarray) -> Any:
        """The items of a row as the sequence returns them."""


class TokenRows(PackedRows):
    """Rows of token ids, int32, read as lists."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> TokenRows:
        ends = cls.ends_of(rows)
        return cls(np.fromiter(chain.from_iterable(rows), np.int32, int(ends[-1]) if len(rows) else 0), ends)

    def _value(self, row: np.ndarray) -> list[int]:
        return row.tolist()

    def padded(self, index_B: np.ndarray, width: int) -> np.ndarray:
        """The rows `index_B`, int64 [B, width], padded with -1 on the right. No row may be longer than `width`."""
        rows_BP = np.full((len(index_B), width), PADDING, np.int64)
        for row_P, index in zip(rows_BP, np.asarray(index_B).tolist(), strict=True):
            tokens = self.row(index)
            row_P[: len(tokens)] = tokens
        return rows_BP

    def add_to(self, digest) -> None:
        """Adds every token, with the length before each row, to a hash."""
        starts = np.concatenate((np.zeros(1, np.int64), self.ends[:-1]))
        for first in range(0, len(self), HASHED_AT_ONCE):
            part = slice(first, first + HASHED_AT_ONCE)
            begin, ends = starts[first], self.ends[part]
            tokens = self.items[begin : ends[-1]]
            counted = np.insert(tokens.astype("<i8"), starts[part] - begin, ends - starts[part])
            digest.update(np.ascontiguousarray(counted, "<i8"))

    def first_above(self, limit: int) -> int | None:
        """The first row with a token id larger than `limit`; None if there is none."""
        above = np.flatnonzero(self.items > limit)
        return int(np.searchsorted(self.ends, above[0], side="right")) if len(above) else None


class TextRows(PackedRows):
    """Texts in UTF-8, uint8, read as strings."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> TextRows:
        rows = [text.encode() for text in texts]
        return cls(np.frombuffer(b"".join(rows), np.uint8), cls.ends_of(rows))

    def _value(self, row: np.ndarray) -> str:
        return row.tobytes().decode()


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Tokenised prompts and the seeded order in which the iterations use them.

    `texts[i]` is what `prompts[i]` says, after a truncation too: the reward function reads what the model read.
    """

    prompts: TokenRows
    texts: TextRows
    seed: int = 0
    source: str = "prompts"  # file name, for messages
    num_truncated: int = 0
    num_dropped: int = 0
    responses: Mapping[str, TokenRows] = field(default_factory=dict)  # by key, where the set has some for each prompt
    columns: TextRows | None = None  # all other columns, a JSON object for each prompt; None: there are none
    _epoch: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict, repr=False, compare=False)
    _hash: list[str] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert len(self.prompts) and len(self.prompts) == len(self.texts), (
            "a prompt set needs prompts and a text for each"
        )

    def __len__(self) -> int:
        return len(self.prompts)

    def rows(self, key: str) -> TokenRows:
        """The tokens of a key that the data set has."""
        return self.prompts if key == PROMPTS else self.responses[key]

    def records(self, index_B: Sequence[int]) -> list[Record]:
        """The other columns of these prompts."""
        return [{} if self.columns is None else json.loads(self.columns[int(index)]) for index in index_B]

    def batch(self, iteration: int, rollout_batch: int) -> list[int]:
        """Indices of the prompts of one iteration (from 0): a pure function of (seed, iteration).

        Iterations run through epochs, each a permutation of all prompts. A batch that spans two epochs repeats no
        prompt, unless rollout_batch is larger than the set.
        """
        assert iteration >= 0 and rollout_batch > 0, (iteration, rollout_batch)
        epoch, start = divmod(iteration * rollout_batch, len(self))
        picked: list[int] = []
        while len(picked) < rollout_batch:
            order = self._order(epoch, rollout_batch)
            picked += order[start : start + rollout_batch - len(picked)].tolist()
            epoch, start = epoch + 1, 0
        return picked

    def fingerprint(self) -> str:
        """Hash of the seed and of all prompts (length, then tokens), compared among the ranks at the start."""
        if not self._hash:
            digest = hashlib.sha256(f"{self.seed} {len(self)}".encode())
            for rows in (self.prompts, *self.responses.values()):
                rows.add_to(digest)
            self._hash.append(digest.hexdigest())
        return self._hash[0]

    def _order(self, epoch: int, rollout_batch: int) -> np.ndarray:
        """Permutation of one epoch. It depends on the end of the previous epoch, back to one that starts a batch."""
        size = len(self)
        aligned = rollout_batch // np.gcd(rollout_batch, size)  # a batch starts with every `aligned`-th epoch
        first = epoch - epoch % int(aligned)
        known, order = self._epoch.get(rollout_batch, (-1, None))
        if order is None or not first <= known <= epoch:
            known, order = first, _permutation(self.seed, first, size)
        for later in range(known + 1, epoch + 1):
            num_before = (later * size) % rollout_batch  # prompts of the batch that spans both epochs, in the first one
            fresh = _permutation(self.seed, later, size)
            order = _without_repeats(fresh, order, num_before, rollout_batch - num_before)
        self._epoch[rollout_batch] = (epoch, order)  # a cache: iterations come in order
        return order


def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    # Sorts raw Philox words, because numpy guarantees stable bits for them, but not for Generator.permutation. The
    # first bit of the counter separates this stream from that of algorithms/training_order.py, which has the same key.
    words = np.random.Philox(key=seed % 2**64, counter=(1 << 255) | (epoch << 128)).random_raw(size)
    return np.argsort(words, kind="stable")


def _without_repeats(order: np.ndarray, previous: np.ndarray, num_before: int, num_after: int) -> np.ndarray:
    """Reorders an epoch so that its first `num_after` prompts exclude the last `num_before` of the previous epoch."""
    if num_before == 0 or num_before + num_after > len(order):
        return order
    first = np.flatnonzero(~np.isin(order, previous[-num_before:]))[:num_after]
    return np.concatenate([order[first], np.delete(order, first)])


def pad(prompts: Iterable[Sequence[int]], width: int | None = None) -> torch.Tensor:
    """prompts_BP int64, padded on the right with -1 to `width` (default: the longest prompt)."""
    import torch

    rows = [list(prompt) for prompt in prompts]
    longest = max(map(len, rows), default=0)
    width = longest if width is None else width
    assert longest <= width, f"a prompt of {longest} tokens does not fit {width}"
    padded = [row + [PADDING] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int64).view(len(rows), width)


def load_prompts(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    key: str = "prompt",
    long_prompts: str = "error",
    seed: int = 0,
    columns: Mapping[str, str] = {},
    max_response_tokens: int = 0,
    eos_id: int | None = None,
    render: Render | None = None,
) -> PromptSet:
    """Reads .jsonl (an object per line), .parquet (a row) or .txt (a prompt per line, taken literally).

    Raises UserError naming file and line for anything it can't use. A prompt of more than max_prompt_tokens tokens is
    an error, is cut to its last tokens (a beginning-of-sequence token stays), or is left out, as long_prompts says.
    columns: of responses to the prompts, by their keys. A response ends with eos_id; one of more than
    max_response_tokens tokens is an error, is cut, or its whole row is left out, as long_prompts says, too. render:
    makes the text of a prompt that is a conversation. Further columns are kept for reward functions.
    """
    assert max_prompt_tokens > 0, max_prompt_tokens
    path = Path(path)
    all_tokens, ends = array("i"), []  # nine times smaller than lists
    texts: list[str] = []
    too_long: list[tuple[str, int]] = []
    num_long = 0  # rows with a response that is too long
    answers: dict[str, list[list[int]]] = {name: [] for name in columns}
    kept: list[str] = []
    for place, record in read_records(path, key):
        where = f"{path}, {place}"
        text, is_rendered = _prompt(where, record, key, render)
        _check_text(where, text)
        given = {name: _response(tokenizer, text_of(where, record, of), eos_id) for name, of in columns.items()}
        longest = max(map(len, given.values()), default=0)
        if longest > max_response_tokens:
            if long_prompts == "error":
                raise UserError(
                    f"{path}, {place}: the response has {longest} tokens, the limit is {max_response_tokens}: raise "
                    "generation.max_new_tokens, or set data.long_prompts=truncate (or drop)"
                )
            num_long += 1
            if long_prompts == "drop":
                continue
            given = {name: tokens[:max_response_tokens] for name, tokens in given.items()}
        tokens = tokenizer.encode(text, special=not is_rendered)
        if not tokens:
            raise UserError(
                f"{path}, {place}: the tokenizer makes no token from the prompt {text!r}: remove the {place}"
            )
        if len(tokens) > max_prompt_tokens:
            too_long.append((place, len(tokens)))
            if long_prompts != "truncate":
                continue
            tokens, text = _truncate(tokens, max_prompt_tokens, tokenizer)
        for name, response in given.items():
            answers[name].append(response)
        all_tokens.extend(tokens)
        ends.append(len(all_tokens))
        texts.append(text)
        kept.append(_other_columns(record, besides=(*columns.values(), *(() if is_rendered else (key,)))))
    if too_long and (long_prompts == "error" or not texts):
        raise UserError(_too_long_message(path, too_long, max_prompt_tokens, dropped_all=long_prompts == "drop"))
    if not texts:
        raise UserError(f"{path} is empty: it needs at least one prompt")
    num_long += len(too_long)
    truncated, dropped = (num_long, 0) if long_prompts == "truncate" else (0, num_long)
    prompts = TokenRows(np.frombuffer(all_tokens, np.int32), np.array(ends, dtype=np.int64))
    responses = {name: TokenRows.of(rows) for name, rows in answers.items()}
    others = TextRows.of(kept) if any(one != "{}" for one in kept) else None
    return PromptSet(prompts, TextRows.of(texts), seed, str(path), truncated, dropped, responses, others)


def _prompt(where: str, record: Record, key: str, render: Render | None) -> tuple[str, bool]:
    """The text of a prompt, and whether it was rendered from a conversation, whose last answer is left out."""
    if key in record and not isinstance(record[key], list):
        return text_of(where, record, key), False
    messages = messages_of(where, record, key if key in record else INSTEAD[key])
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise UserError(f"{where}: the conversation has no message before the assistant's: add the question")
    if render is None:
        raise UserError(f"{where}: the prompt is a list of messages, and only a string can be read here")
    return render(where, messages), True


def _other_columns(record: Record, besides: tuple[str, ...]) -> str:
    """The other columns of a row as a JSON object. What JSON has no type for (a date) becomes a string."""
    return json.dumps({name: value for name, value in record.items() if name not in besides}, default=str)


def _response(tokenizer: Tokenizer, text: str, eos_id: int | None) -> list[int]:
    """The tokens of a response in the data set, which begins no sequence and ends one."""
    tokens = tokenizer.encode(text)
    if tokens and tokens[0] == tokenizer.bos_token_id:
        tokens = tokens[1:]
    return tokens + ([] if eos_id is None else [eos_id])


def _truncate(tokens: list[int], limit: int, tokenizer: Tokenizer) -> tuple[list[int], str]:
    bos = tokens[:1] if tokens[0] == tokenizer.bos_token_id and limit > 1 else []
    last = tokens[-(limit - len(bos)) :]
    return bos + last, tokenizer.decode(last)


def _too_long_message(path: Path, too_long: list[tuple[str, int]], limit: int, *, dropped_all: bool) -> str:
    place, length = too_long[0]
    longest_place, longest = max(too_long, key=lambda item: item[1])
    others = ""
    if len(too_long) > 1:
        others = f" ({len(too_long)} prompts are too long; the longest, {longest_place}, has {longest})"
    left = "; data.long_prompts=drop leaves no prompt" if dropped_all else ""
    fix = "raise data.max_prompt" + ("" if dropped_all else ", or set data.long_prompts=truncate (or drop)")
    return f"{path}, {place}: the prompt has {length} tokens, the limit is {limit}{others}{left}: {fix}"


def _check_text(where: str, text: str) -> None:
    if not text.strip():
        raise UserError(f"{where}: the prompt is empty: write one or remove the entry")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: the prompt has half a surrogate pair at character {error.start + 1}, which is not text: "
            "write the character itself or both halves"
        ) from None
