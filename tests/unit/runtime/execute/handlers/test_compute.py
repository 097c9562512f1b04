"""A compute runs once for each list of ranks that reads its results, on the columns of that reader."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_spmd.algorithms import ppo
from rlhf_spmd.algorithms.group_advantages import leave_one_out_advantages
from rlhf_spmd.config.presets import load
from rlhf_spmd.kernels.known_tokens import KnownTokens
from rlhf_spmd.plan.program.instructions import Program, Run
from rlhf_spmd.runtime.execute.handlers.compute import compute, joined_rows
from rlhf_spmd.runtime.execute.iteration import ALL, Iteration, Store
from rlhf_spmd.runtime.execute.job import Job, RunState
from rlhf_spmd.runtime.world.metric_sums import combine
from tests.programs import make_workload, place_calls

MINI_BATCH, NUM = 6, 2  # rows lie in a matrix [NUM mini-batches, MINI_BATCH columns]


def estimate(program: Program, rank: int) -> tuple[Store, dict]:
    """Returns what a rank's advantage Runs leave in its store, given all inputs; and what they count."""
    config = load("tiny")
    world = SimpleNamespace(rank=rank, device=torch.device("cpu"))
    job = Job(
        config,
        program,
        tokenizer=None,
        prompts=None,
        world=world,
        models=None,
        scorer=None,
        eos_ids=(1,),
        known=KnownTokens(63),
        functions=config.algorithm.functions(program.workload.workflow),
        state=RunState(ppo.State(kl_coef=0.1)),
        columns=program.held(rank),
    )
    generator = torch.Generator().manual_seed(0)
    shape = (NUM, MINI_BATCH, program.workload.max_response)
    whole = {"responses": torch.randint(1, 9, shape, generator=generator)}
    for key in ("logprobs", "ref_logprobs", "values", "scores"):
        width = {"values": (shape[2] + 1,), "scores": ()}.get(key, (shape[2],))
        whole[key] = torch.randn(*shape[:2], *width, generator=generator)
    store = Store(program.workload, program.held(rank))
    for key, value in whole.items():
        for held in store.columns[key]:
            place = ALL, slice(held.start, held.stop)
            store.at(key, place)[:] = value[place]
    nothing = np.zeros(shape[:2], dtype=np.int64)
    data = Iteration(0, 0, nothing, nothing, torch.zeros(1), store)
    for step in program.instructions[rank]:
        if isinstance(step, Run) and step.call == "estimate_advantages":
            compute(job, program.workload.workflow.call(step.call), step, data)
    return store, data.meter.to_message()


def test_a_rank_between_two_trainers_estimates_for_both():
    """Rank 1 trains the actor on the second half of the columns and the critic on the first: both must be as if one
    rank had estimated everything, and a row is counted once."""
    workload = make_workload(mini_batch=MINI_BATCH, num_mini_batches=NUM)
    program = place_calls(workload, "1x3", actor_train=(0, 1), critic_train=(1, 2))
    everything, counts = estimate(place_calls(workload, "1x1"), 0)
    first, second = (ALL, slice(0, MINI_BATCH // 2)), (ALL, slice(MINI_BATCH // 2, MINI_BATCH))
    store, _ = estimate(program, 1)
    for key in ("advantages", "returns"):
        assert torch.equal(store.at(key, second), everything.at(key, second)), f"{key} for the actor"
        assert torch.equal(store.at(key, first), everything.at(key, first)), f"{key} for the critic"
    means, weights = combine([estimate(program, rank)[1] for rank in (0, 1, 2)])
    assert weights["reward"] == workload.num_sequences
    assert means["reward"] == pytest.approx(combine([counts])[0]["reward"])


def test_a_function_of_groups_sees_the_rows_of_an_episode_joined():
    """A divergence from the reference is that of all rows of an episode, blank ones aside."""
    samples, each, generator = 3, 2, torch.Generator().manual_seed(0)
    shape = (2 * samples * each, 5)
    logprobs_BG, ref_BG = torch.randn(2, *shape, generator=generator)
    mask_BG = torch.rand(shape, generator=generator) < 0.6
    mask_BG[5] = False  # a blank row
    scores_B = torch.randn(len(mask_BG) // each, generator=generator).repeat_interleave(each)
    worth = [
        float(scores_B[row]) - 0.5 * float((logprobs_BG - ref_BG)[row : row + each][mask_BG[row : row + each]].sum())
        for row in range(0, len(mask_BG), each)
    ]
    wanted = [
        each_worth
        - sum(other for j, other in enumerate(worth) if j != i and j // samples == i // samples) / (samples - 1)
        for i, each_worth in enumerate(worth)
    ]
    given = [joined_rows(rows, each).unflatten(0, (-1, samples)) for rows in (scores_B, mask_BG, logprobs_BG, ref_BG)]
    advantages_NS, _ = leave_one_out_advantages(*given, kl_coef=0.5)
    assert advantages_NS.flatten().tolist() == pytest.approx(wanted, rel=1e-5)
