"""Rows of tokens and of texts, packed."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_spmd.runtime.data import packed_rows
from rlhf_spmd.runtime.data.packed_rows import TextRows, TokenRows
from rlhf_spmd.runtime.data.prompts import PromptSet, pad


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5), min_size=1, max_size=7), st.data())
def test_rows_of_tokens_are_as_lists(rows, draws):
    kept = TokenRows.of(rows)
    assert kept == rows and list(kept) == rows and len(kept) == len(rows) and kept[-1] == rows[-1]
    assert kept[1:] == rows[1:] and kept[::-2] == rows[::-2] and (kept == [*rows, [1]]) is False
    picked = draws.draw(st.lists(st.integers(0, len(rows) - 1), max_size=5))
    expected = pad([rows[index] for index in picked], 6)
    assert (kept.padded(np.array(picked, dtype=np.int64), (6,)) == expected.numpy()).all()
    limit = draws.draw(st.sampled_from([0, 5, 2**31 - 1]))
    assert kept.first_above(limit) == next((index for index, row in enumerate(rows) if max(row) > limit), None)
    with pytest.raises(IndexError):
        kept[len(rows)]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1))
def test_rows_of_text_are_as_lists(texts):
    kept = TextRows.of(texts)
    assert kept == texts and kept[-1] == texts[-1] and kept[:2] == texts[:2]


@pytest.mark.parametrize("at_once", [1, 2, 10_000])
def test_fingerprint_tells_rows_apart(at_once, monkeypatch):
    """It hashes the length before each prompt, however many are hashed at a time: resumed runs compare it."""
    monkeypatch.setattr(packed_rows, "HASHED_AT_ONCE", at_once)
    rows = [[7, 8], [9], [10, 11, 2**31 - 1]]
    expected = hashlib.sha256(b"5 3")
    for row in rows:
        expected.update(np.array([len(row), *row], dtype="<i8").tobytes())
    texts = TextRows.of("abc")
    assert PromptSet(TokenRows.of(rows), texts, 5).fingerprint() == expected.hexdigest()
    moved = [[7, 8, 9], [10], [11, 2**31 - 1]]
    assert PromptSet(TokenRows.of(moved), texts, 5).fingerprint() != expected.hexdigest()
