"""Cutting rows into micro-batches, and how little is computed besides real tokens."""

from hypothesis import given
from hypothesis import strategies as st

from rlhf_spmd.plan.layout import Layout, cut


@given(lengths=st.lists(st.integers(1, 60), max_size=40), budget=st.integers(1, 80))
def test_a_budget_is_kept_and_no_row_is_lost(lengths, budget):
    parts = cut(lengths, Layout.data_parallel((0,), tokens=budget), micro_batch=3)
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(len(lengths)))
    for part, following in zip(parts, [*parts[1:], None], strict=False):
        held = sum(lengths[part])
        assert held <= budget or part.stop - part.start == 1  # a sequence is never cut
        assert following is None or held + lengths[following.start] > budget  # nor is room left for the next row


@given(num=st.integers(0, 40), size=st.integers(1, 9))
def test_without_a_budget_rows_are_counted(num, size):
    parts = cut([1] * num, Layout.data_parallel((0,)), micro_batch=size)
    assert [part.stop - part.start for part in parts[:-1]] == [size] * max(0, len(parts) - 1)
    assert sum(part.stop - part.start for part in parts) == num
