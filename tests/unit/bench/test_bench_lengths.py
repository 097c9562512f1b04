"""The lengths that `bench lengths` plants, and what it takes for the seconds of a layer."""

import numpy as np
import pytest

from bench.forecast.lengths import LIMIT, MEAN, SIGMA, shuffled
from rlhf_spmd.plan.cost.lengths import lognormal


def test_planted_rows_have_the_intended_distribution():
    bits = np.random.default_rng(0).integers(0, 2**62, 320).tolist()
    lengths = lognormal(MEAN, SIGMA, LIMIT)
    tokens = shuffled(bits, lengths)
    rows = np.array([tokens[one] for one in bits])
    assert rows.mean() == pytest.approx(MEAN, rel=0.01) and rows.var() == pytest.approx(lengths.variance, rel=0.02)
    in_order = [tokens[one] for one in sorted(bits)]
    assert in_order == sorted(rows) and (in_order[0], in_order[-1]) == (1, LIMIT)
