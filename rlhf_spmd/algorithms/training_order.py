"""The order in which rollouts are trained on: a pure function of (seed, iteration, epoch), for any number of ranks.

The rows of an iteration lie in a matrix [num_mini_batches, mini_batch]: a row of the matrix is one mini-batch, and a
data-parallel rank owns a range of the *columns*.

    epoch 0    one random permutation of all rows, laid into the matrix. It is chosen before generation, so prompts can
               be submitted in that order, and a trainer can start on the first mini-batch while later ones are still
               generated.
    epoch > 0  every column of that matrix is permuted independently of the others.

A rollout never leaves its column: at any number of ranks each rank keeps its rollouts for the whole iteration (nothing
is sent between epochs), and has the same number of sequences in every mini-batch. Two rollouts of one column are never
in the same mini-batch, which leaves (num_mini_batches!) ** (mini_batch - 1) different partitions per epoch.

Random bits come from the counter-based Philox bit generator and are turned into permutations by a stable sort, so the
order does not depend on numpy's sampling algorithms, which may change between versions.
"""

import numpy as np


def epoch_order(seed: int, iteration: int, epoch: int, num_rows: int, mini_batch: int, *, group: int = 1) -> np.ndarray:
    """Returns row numbers, int64 [num_mini_batches, mini_batch]; every row 0 .. num_rows-1 appears exactly once.

    group: this many neighbouring rows, the samples of one prompt, stay side by side in epoch 0.
    """
    assert num_rows % mini_batch == 0, f"{num_rows} rows do not divide into mini-batches of {mini_batch}"
    shape = (num_rows // mini_batch, mini_batch)
    groups = np.argsort(_random_bits(seed, iteration, 0, num_rows // group), kind="stable")
    first = (groups[:, None] * group + np.arange(group)).reshape(shape)
    if epoch == 0:
        return first
    keys = _random_bits(seed, iteration, epoch, num_rows).reshape(shape)
    return np.take_along_axis(first, np.argsort(keys, axis=0, kind="stable"), axis=0)


def _random_bits(seed: int, iteration: int, epoch: int, num: int) -> np.ndarray:
    """Returns random bits, uint64 [num]. The key is the seed; the upper words of the counter are iteration and epoch,
    so that streams cannot overlap."""
    assert seed >= 0 and iteration >= 0 and epoch >= 0
    return np.random.Philox(key=seed, counter=(epoch << 192) | (iteration << 128)).random_raw(num)
