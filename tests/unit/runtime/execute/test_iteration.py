"""An iteration's data on a rank: which rows it holds, where they lie, random numbers, the hash of all tokens."""

import numpy as np
import pytest
import torch

from rlhf_spmd.kernels.philox import random_bits
from rlhf_spmd.plan.program.instructions import Program, Run, Wait
from rlhf_spmd.runtime.execute import iteration
from rlhf_spmd.runtime.execute.iteration import ALL, Iteration, Store
from tests.programs import make_workload, place_calls

HOLE = {"actor_generate": (0,), "reference_infer": (1, 2, 3), "reward_infer": (2,)}


def columns(ranges) -> list[int]:
    return [column for one in ranges for column in one]


@pytest.mark.parametrize(
    "program",
    [
        place_calls(make_workload(mini_batch=7, num_mini_batches=2), "1x4", **HOLE),
        place_calls(make_workload(mini_batch=7, num_mini_batches=2), "1x4", actor_train=(0, 1), critic_train=(2, 3)),
    ],
    ids=["with a hole", "apart"],
)
def test_a_rank_holds_what_it_reads_and_makes(program: Program):
    for rank in program.cluster.ranks:
        held = {key: columns(ranges) for key, ranges in program.held(rank).items()}
        for found in held.values():
            assert found == sorted(set(found))
        touched: dict[str, set[int]] = {}
        for step in program.instructions[rank]:
            if isinstance(step, Run):
                for key in program.reads(step, rank) + program.makes(step, rank):
                    touched.setdefault(key, set()).update(program.columns_of(step, rank))
            elif isinstance(step, Wait):
                for message in program.transfers[step.transfer].received_by(rank):
                    for key in message.keys:
                        touched.setdefault(key, set()).update(message.columns)
        assert {key: sorted(found) for key, found in touched.items()} == held


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
