"""An iteration's data on a rank: which rows it holds, where they lie, random numbers, the hash of all tokens."""

import numpy as np
import pytest
import torch

from rlhf_spmd.kernels.philox import random_bits
from rlhf_spmd.runtime.execute import iteration
from rlhf_spmd.runtime.execute.iteration import ALL, Iteration, Store
from tests.programs import make_workload


@pytest.mark.parametrize("at_once", [1, 24, 10**6])
def test_random_numbers_of_some_columns(at_once, monkeypatch):
    """Those of the whole matrix, however many are made at a time."""
    monkeypatch.setattr(iteration, "NUMBERS_AT_ONCE", at_once)
    workload = make_workload(mini_batch=5, num_mini_batches=2)
    prompt_MC = np.random.default_rng(0).permutation(1000)[:10].reshape(2, 5)
    sample_MC = prompt_MC % 3
    data = Iteration(4, 11, prompt_MC, sample_MC, torch.zeros(1), Store(workload, {}))
    whole = random_bits(11, 3, 4, prompt_MC.flatten(), sample_MC.flatten(), workload.max_response).reshape(2, 5, -1)
    for part in (ALL, slice(1, 4), slice(3, 3)):
        assert np.array_equal(data.random_bits(3, part).numpy(), whole[:, part])
