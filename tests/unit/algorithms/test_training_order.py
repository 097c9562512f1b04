"""The mini-batch order: random, reproducible, and no rollout ever changes its rank (rows 16 and 22)."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_spmd.algorithms.training_order import epoch_order


@given(
    seed=st.integers(0, 2**64 - 1),
    iteration=st.integers(0, 10**6),
    epoch=st.integers(0, 5),
    num_mini_batches=st.integers(1, 9),
    mini_batch=st.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
def test_a_permutation_whose_columns_keep_their_rows(seed, iteration, epoch, num_mini_batches, mini_batch):
    num_rows = num_mini_batches * mini_batch
    first = epoch_order(seed, iteration, 0, num_rows, mini_batch)
    later = epoch_order(seed, iteration, epoch, num_rows, mini_batch)
    assert later.shape == (num_mini_batches, mini_batch) and later.dtype == np.int64
    assert sorted(later.ravel()) == list(range(num_rows))
    assert (np.sort(later, axis=0) == np.sort(first, axis=0)).all()


def test_fixed_for_ever():
    """A resumed run and another machine must draw the same order: committed numbers."""
    assert epoch_order(17, 3, 0, 12, 4).tolist() == [[1, 2, 8, 10], [6, 11, 4, 5], [3, 7, 9, 0]]
    assert epoch_order(17, 3, 1, 12, 4).tolist() == [[3, 11, 4, 10], [6, 7, 8, 0], [1, 2, 9, 5]]
    assert epoch_order(17, 3, 2, 12, 4).tolist() != epoch_order(17, 3, 1, 12, 4).tolist()
