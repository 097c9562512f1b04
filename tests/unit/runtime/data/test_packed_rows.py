"""Rows of tokens and of texts, packed."""

import hashlib

import numpy as np
import pytest

from rlhf_spmd.runtime.data import packed_rows
from rlhf_spmd.runtime.data.packed_rows import TextRows, TokenRows
from rlhf_spmd.runtime.data.prompts import PromptSet


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
