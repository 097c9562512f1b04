"""A compute runs once for each list of ranks that reads its results, on the columns of that reader."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_spmd.config import load
from rlhf_spmd.plan.program import Program, Run
from rlhf_spmd.runtime.calls import Calls, Iteration, State
from rlhf_spmd.runtime.metrics import combine
from tests.programs import make_workload, place_calls

MINI_BATCH, NUM = 6, 2  # rows lie in a matrix [NUM mini-batches, MINI_BATCH columns]


def estimate(program: Program, rank: int) -> tuple[dict[str, torch.Tensor], dict]:
    """What a rank's advantage Runs leave in its store, given all inputs; and what they count."""
    config = load("tiny")
    world = SimpleNamespace(rank=rank, device=torch.device("cpu"))
    calls = Calls(program, config, world, None, None, eos_ids=(1,), num_known=63)
    generator = torch.Generator().manual_seed(0)
    shape = (NUM, MINI_BATCH, program.workload.max_response)
    store = {"responses": torch.randint(1, 9, shape, generator=generator)}
    for key in ("logprobs", "ref_logprobs", "values", "scores"):
        width = {"values": (shape[2] + 1,), "scores": ()}.get(key, (shape[2],))
        store[key] = torch.randn(*shape[:2], *width, generator=generator)
    nothing = np.zeros(shape[:2], dtype=np.int64)
    data = Iteration(0, nothing, nothing, torch.zeros(1), torch.zeros(1), store)
    for step in program.instructions[rank]:
        if isinstance(step, Run) and step.call == "estimate_advantages":
            calls.run(step, data, State(kl_coef=0.1))
    return store, data.meter.to_message()


def test_a_rank_between_two_trainers_estimates_for_both():
    """Rank 1 trains the actor on the second half of the columns and the critic on the first: both must be as if one
    rank had estimated everything, and a row is counted once."""
    workload = make_workload(mini_batch=MINI_BATCH, num_mini_batches=NUM)
    program = place_calls(workload, "1x3", actor_train=(0, 1), critic_train=(1, 2))
    everything, counts = estimate(place_calls(workload, "1x1"), 0)
    half = MINI_BATCH // 2
    store, _ = estimate(program, 1)
    for key in ("advantages", "returns"):
        assert torch.equal(store[key][:, half:], everything[key][:, half:]), f"{key} for the actor"
        assert torch.equal(store[key][:, :half], everything[key][:, :half]), f"{key} for the critic"
    means, weights = combine([estimate(program, rank)[1] for rank in (0, 1, 2)])
    assert weights["reward"] == workload.num_sequences
    assert means["reward"] == pytest.approx(combine([counts])[0]["reward"])
