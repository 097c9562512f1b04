"""Clusters and layouts: the grid, who owns which columns, ranks in words."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout, format_ranks


@given(ranks=st.lists(st.integers(0, 20), unique=True))
def test_ranks_in_words_tell_all(ranks):
    """The words name every rank in order, so two lists read the same only if they are the same."""
    parts = [part.partition("-") for part in format_ranks(tuple(ranks)).split(",") if part]
    named = [rank for start, _, stop in parts for rank in range(int(start), int(stop or start) + 1)]
    assert named == ranks


@given(dp=st.integers(1, 12), model=st.integers(1, 4), mini_batch=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_columns_are_a_fair_partition(dp, model, mini_batch):
    """The shards' columns follow each other without hole or overlap, their sizes differ by at most one, and all ranks
    of a shard own the same."""
    layout = Layout(range(100, 100 + dp * model), dp=dp, pp=model)
    owned = [layout.columns(rank, mini_batch) for rank in layout.ranks]
    shards = owned[::model]
    assert [column for shard in shards for column in shard] == list(range(mini_batch))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert all(owned[index] == shards[index // model] for index in range(dp * model))


def test_gradients_are_summed_on_nodes_first():
    """Only if there are several nodes, each with as many ranks of a shard."""
    node_of = Cluster.parse("2x4", "cpu").node_of
    assert Layout.data_parallel((5, 4, 1, 0)).sum_ranks(4, node_of) == ((4, 5), (0, 4))
    assert Layout.grid_of(range(8), tp=2).sum_ranks(7, node_of) == ((5, 7), (3, 7))
    assert Layout.grid_of(range(8), tp=4).sum_ranks(1, node_of) == ((1,), (1, 5))
    assert Layout.data_parallel(range(4)).sum_ranks(2, node_of) == ((0, 1, 2, 3), (2,))
    assert Layout.data_parallel(range(3, 6)).sum_ranks(4, node_of) == ((4,), (3, 4, 5))  # one here, two there
    assert Layout.data_parallel(range(8), zero=3).sum_ranks(2, node_of) == ((2,), tuple(range(8)))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout((), dp=0), ["no rank is left", "at least one"]),
        (Layout((1, 2, 1), dp=3), ["twice", "[1, 2, 1]"]),
        (Layout((0, 1), dp=3), ["dp 3 x pp 1 x tp 1", "number of ranks, 2"]),
        (Layout((0, 1), dp=-2, pp=-1), ["dp -2 x pp -1", "less than 1"]),
        (Layout((0,), dp=1, zero=7), ["ZeRO stage 7", "0, 1, 2 or 3"]),
        (Layout((0,), dp=1, micro_batch=0), ["micro_batch 0", "at least 1"]),
    ],
)
def test_problems_of_a_grid_in_words(layout, words):
    text = "; ".join(layout.problems())
    assert all(word in text for word in words), text


# ---- clusters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["", "8", "x8", "8x", "0x8", "8x0", "-1x8", "2 x 8", "2x8x2", "axb", "٢x٢", "2x8\n"])
def test_layout_strings_that_are_none(layout):
    with pytest.raises(UserError, match="not of the form NxG"):
        Cluster.parse(layout)
