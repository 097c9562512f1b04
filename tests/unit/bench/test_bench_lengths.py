"""The lengths that `bench lengths` plants, and what it takes for the seconds of a layer."""

from types import SimpleNamespace

import numpy as np
import pytest

from bench.forecast.lengths import LIMIT, MEAN, PAIR_S, SIGMA, TOKEN_S, TRAINED, layer_s, shuffled
from rlhf_spmd.plan.cost.lengths import lognormal


def test_planted_rows_have_the_intended_distribution():
    bits = np.random.default_rng(0).integers(0, 2**62, 320).tolist()
    lengths = lognormal(MEAN, SIGMA, LIMIT)
    tokens = shuffled(bits, lengths)
    rows = np.array([tokens[one] for one in bits])
    assert rows.mean() == pytest.approx(MEAN, rel=0.01) and rows.var() == pytest.approx(lengths.variance, rel=0.02)
    in_order = [tokens[one] for one in sorted(bits)]
    assert in_order == sorted(rows) and (in_order[0], in_order[-1]) == (1, LIMIT)


def test_a_pass_takes_the_seconds_of_its_tokens_and_pairs():
    context = SimpleNamespace(lengths=[3, 5])
    assert layer_s(context, 1, trains=False) == pytest.approx(8 * TOKEN_S + 17 * PAIR_S)
    assert layer_s(context, 2, trains=True) == pytest.approx(TRAINED / 2 * (8 * TOKEN_S + 17 * PAIR_S))
