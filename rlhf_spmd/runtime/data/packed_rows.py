"""Rows of different lengths (tokens, numbers, texts) in one array each, without overhead per row."""

# B prompts in a batch, P prompt tokens (padded)

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence, Sized
from itertools import chain
from math import prod
from typing import Any, ClassVar, Self

import numpy as np

HASHED_AT_ONCE = 10_000  # rows
PADDING = -1  # never a token id, so it cannot be confused with an end of sequence that a tokenizer uses for padding


class PackedRows(Sequence):
    """A sequence of rows of different lengths, stored in one array without overhead per row."""

    def __init__(self, items: np.ndarray, ends: np.ndarray):
        """items: of all rows; ends: int64 [rows], where each row ends."""
        self.items, self.ends = items, ends

    @classmethod
    def joined(cls, items: np.ndarray, rows: Sequence[Sized]) -> Self:
        """items: of these rows, one after the other."""
        return cls(items, np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        return self._value(self.row(range(len(self))[index]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def row(self, index: int) -> np.ndarray:
        """Returns the items of a row (0 <= index < len)."""
        return self.items[int(self.ends[index - 1]) if index else 0 : int(self.ends[index])]

    @abstractmethod
    def _value(self, row: np.ndarray) -> Any:
        """Returns the items of a row as the sequence returns them."""

    @abstractmethod
    def add_to(self, digest) -> None:
        """Adds all rows to a hash."""


class _Numbers(PackedRows):
    """Rows of numbers of one type, read as lists."""

    dtype: ClassVar[type[np.number]]
    padding: ClassVar[int]
    padded_dtype: ClassVar[type[np.number]]

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> Self:
        return cls.joined(np.fromiter(chain.from_iterable(rows), cls.dtype), rows)

    def _value(self, row: np.ndarray) -> list[Any]:
        return row.tolist()

    def padded(self, index_B: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the rows `index_B`, [B, *shape], with padding on the right. No row may be longer than that."""
        rows_BW = np.full((len(index_B), prod(shape)), self.padding, self.padded_dtype)
        for row_W, index in zip(rows_BW, np.asarray(index_B).tolist(), strict=True):
            values = self.row(index)
            row_W[: len(values)] = values
        return rows_BW.reshape(len(index_B), *shape)


class TokenRows(_Numbers):
    """Rows of token ids, int32; padded: int64."""

    dtype, padding, padded_dtype = np.int32, PADDING, np.int64

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
        """Returns the first row with a token id larger than `limit`; None if there is none."""
        above = np.flatnonzero(self.items > limit)
        return int(np.searchsorted(self.ends, above[0], side="right")) if len(above) else None


class NumberRows(_Numbers):
    """Rows of numbers, float32: one for the row, or one for each token of its response."""

    dtype, padding, padded_dtype = np.float32, 0, np.float32

    def add_to(self, digest) -> None:
        """Adds the numbers to a hash."""
        digest.update(np.ascontiguousarray(self.items, "<f4"))


class TextRows(PackedRows):
    """Texts in UTF-8, uint8, read as strings."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> TextRows:
        rows = [text.encode() for text in texts]
        return cls.joined(np.frombuffer(b"".join(rows), np.uint8), rows)

    def _value(self, row: np.ndarray) -> str:
        return row.tobytes().decode()

    def add_to(self, digest) -> None:
        """Adds the texts, and where each ends, to a hash."""
        digest.update(np.ascontiguousarray(self.ends, "<i8"))
        digest.update(np.ascontiguousarray(self.items))
