"""Masks of dropout against the numbers that numpy computes."""

import numpy as np
import pytest
import torch

from rlhf_spmd.kernels.dropout import Dropout, philox_words
from rlhf_spmd.kernels.philox import philox_uint32

SEED = 2**64 - 3


def make(rate: float, num_tokens: int = 50) -> Dropout:
    token_N = torch.arange(num_tokens)
    return Dropout(SEED, rate, 2**32 - 1 - token_N // 10, token_N % 10)


def test_words_are_those_of_numpy():
    generator = torch.Generator().manual_seed(0)
    counter = [torch.randint(2**32, (300,), generator=generator) for _ in range(3)]
    found = torch.stack(philox_words(SEED, [*counter, 2**32 - 1]))
    wanted = philox_uint32(SEED, *(one.numpy() for one in counter), 2**32 - 1)
    assert found.tolist() == wanted.tolist()


def test_an_input_is_dropped_where_its_lane_is_small():
    dropout, num_features = make(0.3), 21
    words = philox_uint32(SEED, np.arange(3), dropout.position_N.numpy()[:, None], dropout.row_N.numpy()[:, None], 5)
    lanes = words.transpose(1, 2, 0).copy().view("<u2").reshape(50, -1)[:, :num_features]
    assert dropout.mask(range(num_features), 5).tolist() == (lanes < round(0.3 * 2**16)).tolist()


@pytest.mark.parametrize("part", [range(3, 17), range(8, 16), range(15, 16), range(30, 33)])
def test_a_rank_makes_its_part_of_the_mask(part):
    dropout = make(0.5)
    whole = dropout.mask(range(33), 2)
    assert torch.equal(dropout.mask(part, 2), whole[:, part.start : part.stop])
    some = torch.tensor([7, 3, 40])
    own = Dropout(SEED, 0.5, dropout.row_N[some], dropout.position_N[some])
    assert torch.equal(own.mask(part, 2), whole[some, part.start : part.stop])


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_the_share_of_what_is_dropped(rate):
    dropout = make(rate, 1000)
    one, other = dropout.mask(range(200), 1).double(), dropout.mask(range(200), 2).double()
    deviation = (rate * (1 - rate) / one.numel()) ** 0.5
    assert float(one.mean()) == pytest.approx(rate, abs=5 * deviation)
    assert float((one * other).mean()) == pytest.approx(rate**2, abs=5 * deviation), "layers are independent"
    assert float((one[1:] * one[:-1]).mean()) == pytest.approx(rate**2, abs=5 * deviation), "tokens are independent"
    assert dropout.scale == pytest.approx(1 / (1 - rate), rel=1e-4)
