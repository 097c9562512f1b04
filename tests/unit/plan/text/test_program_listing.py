"""Tables of a program's listing in a narrow terminal."""

import pytest

from rlhf_spmd.plan.text.program_listing import table

ROWS = [
    ("ranks", "weights", "KV cache", "sequences per rank"),
    ("0-15", "49.7 GiB", "8.0 GiB", "32"),
    ("16", "-", "12.0 GiB", "128"),
]
WIDE = """\
  ranks  weights   KV cache  sequences per rank
  -----  --------  --------  ------------------
  0-15   49.7 GiB  8.0 GiB   32
  16     -         12.0 GiB  128"""
PARTS = """\
  ranks  weights   KV cache
  -----  --------  --------
  0-15   49.7 GiB  8.0 GiB
  16     -         12.0 GiB

  ranks  sequences per rank
  -----  ------------------
  0-15   32
  16     128"""


@pytest.mark.parametrize(("columns", "text"), [(None, WIDE), (49, WIDE), (37, PARTS)])
def test_a_table_is_not_wider_than_the_terminal(columns, text):
    assert table(ROWS, columns) == text
    assert columns is None or max(map(len, text.split("\n"))) <= columns
